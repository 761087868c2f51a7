"""The completions of one attempt as a tree: who continued whom, which calls are retries of each other.

Built once from the stored capture; builders only read it. Cost is linear in the captured tokens, because prompts stay
in their delta encoding: a prompt is the parent's sequence up to a point plus the new tail.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from polar.arrays import ids
from polar.completion import Completion
from reconstruction.tokens import Node, TokenTree, common_prefix, is_prefix, tokens_from
from reconstruction.trainable import reason_against

# The left-out reason of a completion whose prompt can't be resolved: its parent is missing, too short or a cycle.
CORRUPT = "corrupt_capture"


@dataclass(eq=False)
class Call:
    """One completion in the tree. `prompt` and `full` are the ends of its prompt and of prompt + sampled ids.

    `next` is the child that goes on in the same chain; other children start chains of their own. `retry_of` is set on
    the abandoned siblings of a call with an equal prompt. `height`: calls on the longest path below this one.
    """

    completion: Completion
    prompt: Node
    full: Node
    order: int
    left_out: str = ""
    parent: Call | None = None
    children: list[Call] = field(default_factory=list)
    next: Call | None = None
    retry_of: Call | None = None
    height: int = 0

    @property
    def sampled(self) -> np.ndarray:
        return self.completion.sampled_ids


@dataclass(eq=False)
class AttemptTree:
    """`calls` in order of arrival; `corrupt` are completions without a resolvable prompt."""

    tokens: TokenTree
    calls: list[Call]
    corrupt: list[Completion]
    retries: int = 0

    def chains(self) -> list[list[Call]]:
        """Every call in exactly one chain; chains by their first call, calls by order of arrival."""
        out = []
        for call in self.calls:
            if call.parent is not None and call.parent.next is call:
                continue
            chain, at = [call], call
            while at.next is not None:
                at = at.next
                chain.append(at)
            out.append(chain)
        return out


def grow(completions: Iterable[Completion]) -> AttemptTree:
    """The tree of an attempt. The same set of completions gives the same tree, whatever order they come in."""
    # Where a capture knows no order, the shorter prompt comes first: a parent's is shorter than its child's.
    ordered = sorted(completions, key=lambda c: (c.index, c.prompt_length, c.completion_id))
    # A store that repeats a write after a lost answer may hold one completion twice: it was sampled once.
    unique = list({c.completion_id: c for c in reversed(ordered)}.values())[::-1]
    tree = AttemptTree(TokenTree(), [], [])
    _place(tree, unique)
    _link(tree)
    _choose(tree)
    return tree


def _place(tree: AttemptTree, completions: list[Completion]) -> None:
    """Put every resolvable prompt and sample into the token tree."""
    by_id = {c.completion_id: c for c in completions}
    placed: dict[str, Call | None] = {}
    for c in completions:
        # Parents come first in a sound capture; the walk also covers one that doesn't, and stops at a cycle.
        path: list[Completion] = []
        seen: set[str] = set()
        at: Completion | None = c
        while at is not None and at.completion_id not in placed and at.completion_id not in seen:
            path.append(at)
            seen.add(at.completion_id)
            at = by_id.get(at.parent_id) if _is_delta(at) and at.parent_id else None
        for item in reversed(path):
            placed[item.completion_id] = _place_one(tree.tokens, item, placed)
    for order, c in enumerate(completions):
        call = placed[c.completion_id]
        if call is None:
            tree.corrupt.append(c)
        else:
            call.order = order
            tree.calls.append(call)


def _is_delta(c: Completion) -> bool:
    return c.parent_id is not None and c.prompt_shared > 0


def _place_one(tokens: TokenTree, c: Completion, placed: dict[str, Call | None]) -> Call | None:
    start = tokens.root
    if _is_delta(c):
        parent = placed.get(c.parent_id or "")
        if parent is None or parent.full.depth < c.prompt_shared:
            return None
        start = tokens.seek(parent.full, c.prompt_shared)
    elif c.prompt_shared:
        return None
    prompt = tokens.insert(start, ids(c.prompt_tail))
    full = tokens.insert(prompt, ids(c.sampled_ids))
    return Call(c, prompt, full, order=0, left_out=reason_against(c))


def _link(tree: AttemptTree) -> None:
    """Find each call's parent: the one the proxy recorded, else the longest earlier prompt that is a strict prefix."""
    by_id: dict[str, Call] = {}
    at_node: dict[Node, list[Call]] = {}
    for call in tree.calls:
        parent = _recorded_parent(call, by_id, at_node) or _parent_by_prefix(call, at_node)
        if parent is not None:
            call.parent = parent
            parent.children.append(call)
        by_id[call.completion.completion_id] = call
        at_node.setdefault(call.prompt, []).append(call)


def _recorded_parent(call: Call, by_id: dict[str, Call], at_node: dict[Node, list[Call]]) -> Call | None:
    """Only two links name a parent; with the others `parent_id` merely says what the stored prompt refers to."""
    c = call.completion
    if c.link == "sibling":
        twins = at_node.get(call.prompt, [])
        same = [
            t for t in twins if (t.completion.parent_id, t.completion.prompt_shared) == (c.parent_id, c.prompt_shared)
        ]
        return (same or twins)[0].parent if twins else None
    parent = by_id.get(c.parent_id or "") if c.link == "continued" else None
    if parent is None or parent.prompt is call.prompt or not is_prefix(parent.prompt, call.prompt):
        return None
    return parent


def _parent_by_prefix(call: Call, at_node: dict[Node, list[Call]]) -> Call | None:
    node = call.prompt.parent
    while node is not None and node not in at_node:
        node = node.parent
    if node is None:
        return None
    candidates = at_node[node]
    if len(candidates) == 1:
        return candidates[0]
    # Retries of one prompt: the agent went on from the sample that the new prompt repeats.
    said = tokens_from(call.prompt, node.depth)
    return max(candidates, key=lambda p: (common_prefix(p.sampled, said), not p.children, p.order))


def _choose(tree: AttemptTree) -> None:
    """Decide which child goes on in its parent's chain, and mark the retries that the agent abandoned."""
    for call in reversed(tree.calls):
        if call.children:
            call.height = 1 + max(child.height for child in call.children)
    groups: dict[tuple[Node, Call | None], list[Call]] = {}
    for call in tree.calls:
        groups.setdefault((call.prompt, call.parent), []).append(call)
    chosen: dict[Call, list[Call]] = {}
    for (_, parent), group in groups.items():
        # Continued wins; among answers that nobody continued, the last one delivered is the one that was used.
        best = max(group, key=lambda c: (c.height, not c.left_out, c.completion.delivered, c.order))
        for call in group:
            if call is not best and not call.children:
                call.retry_of = best
                tree.retries += 1
        if parent is not None:
            chosen.setdefault(parent, []).append(best)
    for parent, rivals in chosen.items():
        # A side call (a title, a summary, a subagent with the same beginning) must not take the conversation's place.
        if len(rivals) > 1:
            rivals.sort(key=lambda c: c.order)
            parent.next = max(rivals, key=lambda c: (_same_role(parent, c), c.height, is_prefix(parent.full, c.prompt)))
        else:
            parent.next = rivals[0]


def _same_role(a: Call, b: Call) -> bool:
    roles = {a.completion.role, b.completion.role}
    return len(roles) == 1 or "unknown" in roles
