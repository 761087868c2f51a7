"""A radix tree of token sequences: every shared prefix is held once, as a view of the arrays that were put in."""

from __future__ import annotations

import numpy as np

_FIRST_PROBE = 256


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that agree. Looks at growing blocks, so an early difference costs little."""
    n = min(len(a), len(b))
    start, size = 0, _FIRST_PROBE
    while start < n:
        stop = min(n, start + size)
        differ = a[start:stop] != b[start:stop]
        if differ.any():
            return start + int(differ.argmax())
        start, size = stop, size * 2
    return n


class Node:
    """The end of one sequence: the tokens from the root to here. `edge` int32 (depth - parent.depth,)."""

    __slots__ = ("children", "depth", "edge", "parent")

    def __init__(self, parent: Node | None, edge: np.ndarray, depth: int):
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.children: dict[int, Node] = {}


class TokenTree:
    """`compared` counts tokens looked at while inserting: the tree's own measure of its cost."""

    def __init__(self) -> None:
        self.root = Node(None, np.empty(0, dtype=np.int32), 0)
        self.compared = 0
        # The last sequence put in at the root: captures without parents repeat most of it in the next prompt.
        self._hint: tuple[np.ndarray, Node] | None = None

    def insert(self, start: Node, tokens: np.ndarray) -> Node:
        """The node of (start's sequence + tokens), made if new."""
        node, at = start, 0
        if start is self.root and self._hint is not None and len(tokens):
            known, end = self._hint
            at = common_prefix(known, tokens)
            self.compared += at
            node = self.seek(end, at)
        node = self._walk(node, tokens[at:])
        if start is self.root and len(tokens):
            self._hint = (tokens, node)
        return node

    def _walk(self, node: Node, rest: np.ndarray) -> Node:
        while len(rest):
            child = node.children.get(int(rest[0]))
            if child is None:
                leaf = Node(node, rest, node.depth + len(rest))
                node.children[int(rest[0])] = leaf
                return leaf
            same = common_prefix(child.edge, rest)
            self.compared += same
            node = child if same == len(child.edge) else self._split(child, same)
            rest = rest[same:]
        return node

    def seek(self, node: Node, depth: int) -> Node:
        """The ancestor of `node` with exactly `depth` tokens, made if it lies inside an edge."""
        while node.parent is not None and node.parent.depth >= depth:
            node = node.parent
        return node if node.depth == depth else self._split(node, depth - node.depth + len(node.edge))

    def _split(self, node: Node, at: int) -> Node:
        """A new node after the first `at` tokens of node's edge. `node` itself keeps its identity."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.edge)
        middle = Node(parent, node.edge[:at], parent.depth + at)
        parent.children[int(node.edge[0])] = middle
        node.parent, node.edge = middle, node.edge[at:]
        middle.children[int(node.edge[0])] = node
        return middle


def is_prefix(a: Node, b: Node) -> bool:
    """Is a's sequence a prefix of b's (or equal)?"""
    node: Node | None = b
    while node is not None and node.depth > a.depth:
        node = node.parent
    return node is a


def pieces(node: Node, start: int) -> list[np.ndarray]:
    """The tokens of node's sequence from position `start` on, as views in order."""
    out: list[np.ndarray] = []
    at: Node | None = node
    while at is not None and at.depth > start:
        begin = at.depth - len(at.edge)
        out.append(at.edge[start - begin :] if begin < start else at.edge)
        at = at.parent
    out.reverse()
    return out


def tokens_from(node: Node, start: int) -> np.ndarray:
    """The same as one array (copied only when it lies in several pieces)."""
    parts = pieces(node, start)
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
