"""What the proxy remembers of one attempt, to continue its conversations: rebuilt from the capture stream at any time."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from polar import arrays
from polar.completion import Completion, Role
from polar.store.capture import Seen
from proxy import echo, history
from proxy.neutral import Message

if TYPE_CHECKING:
    from proxy.generation import Generation

_TWINS = 64  # answers to one prompt that a turn is compared with
_FAILED = 1024  # failed requests remembered per attempt
_NODE = 1000  # what a completion takes beside its tokens, in tokens (of 4 bytes)
_CACHED = 4  # full token sequences kept per attempt; others are put together again when asked for


class Node(Struct, kw_only=True, eq=False):
    """A stored completion. `digests` covers its messages and, last, its response; `tail` and `sampled` are int32.
    `tools_set` is `tools_hash` without the order. `delivered` is exact once `certain`, else as it was when it was stored."""

    id: str
    parent: Node | None
    shared: int
    tail: np.ndarray
    sampled: np.ndarray
    digests: array
    response: Message
    model: str
    tools_hash: str
    tools_set: str
    request_hash: str
    role: Role
    whole: bool  # it ended by itself, so it can be delivered again
    delivered: bool
    certain: bool = False
    usage: tuple[int, int, int]  # prompt, sampled, cached tokens
    finish_reason: str = "stop"
    stop_matched: int | str | None = None

    @property
    def prompt_length(self) -> int:
        return self.shared + len(self.tail)


class Attempt:
    """The index of one attempt. `generations` are the calls in flight by request hash."""

    def __init__(self, attempt_id: str):
        self.id = attempt_id
        self.closed = False
        self.generations: dict[str, Generation] = {}
        self.nodes: OrderedDict[str, Node] = OrderedDict()
        self.by_history: dict[int, list[Node]] = {}  # digest behind the response
        self.by_prompt: dict[int, list[Node]] = {}  # digest before the response
        self.by_turn: dict[int, list[Node]] = {}  # digest of the response alone
        self.by_call: dict[str, list[Node]] = {}  # several where the model's format makes up the ids
        self.by_request: dict[str, list[Node]] = {}
        self.failed: set[str] = set()  # request hashes whose last generation here gave no whole answer
        self.tokens = 0  # held in memory
        self.seen = Seen()  # of the capture stream
        self._full: OrderedDict[str, np.ndarray] = OrderedDict()

    def add(self, c: Completion) -> Node | None:
        """Index a stored completion; None if its parent is unknown. Idempotent."""
        if c.completion_id in self.nodes:
            return self.nodes[c.completion_id]
        parent = self.nodes.get(c.parent_id) if c.parent_id else None
        if c.parent_id and parent is None:
            return None
        digests, calls = history.START, []
        if parent is not None:
            digests = parent.digests[: c.message_shared + 1]
            if c.message_shared == len(parent.digests) - 1:
                calls = history.call_ids(parent.response)
        digests = self.read(c.messages, digests, calls)
        same = parent is not None and parent.tools_hash == c.tools_hash
        tools_set = parent.tools_set if parent is not None and same else history.unordered(c.tools)
        node = Node(
            id=c.completion_id,
            parent=parent,
            shared=c.prompt_shared,
            tail=arrays.ids(c.prompt_tail).copy(),  # a view would keep the whole prompt in memory
            sampled=arrays.ids(c.sampled_ids),
            digests=digests + array("Q", [history.step(digests[-1], c.response)]),
            response=c.response,
            model=c.model,
            tools_hash=c.tools_hash,
            tools_set=tools_set,
            request_hash=c.request_hash,
            role=c.role,
            whole=c.finish_reason in ("stop", "length", "tool_calls"),
            delivered=c.delivered,
            usage=(c.prompt_length, len(c.sampled_ids), c.cached_tokens),
            finish_reason=c.finish_reason,
            stop_matched=c.stop_matched,
        )
        self.nodes[node.id] = node
        self.by_history.setdefault(node.digests[-1], []).append(node)
        self.by_prompt.setdefault(node.digests[-2], []).append(node)
        self.by_request.setdefault(node.request_hash, []).append(node)
        self.by_turn.setdefault(history.step(0, node.response), []).append(node)
        for call in history.call_ids(node.response):
            self.by_call.setdefault(call, []).append(node)
        self.tokens += len(node.tail) + len(node.sampled) + 2 * len(digests) + _NODE
        return node

    def read(self, messages: list[Message], start: array = history.START, calls: list[str] | None = None) -> array:
        """Digests (k + n,) of a history that goes on behind `start` with n messages; `calls` are the ids of the calls
        that its first tool results answer. Turns that are echoes of completions get the completions' digests."""
        out, ranks = array("Q", start), history.Ranks(calls)
        for m in messages:
            if m["role"] == "assistant":
                ranks.turn(m)
                out.append(self._turn(out[-1], m))
            else:
                out.append(history.step(out[-1], m, ranks.result(m) if m["role"] == "tool" else 0))
        return out

    def _turn(self, before: int, m: Message) -> int:
        known = self.by_prompt.get(before, ())[-_TWINS:]
        for n in reversed(known):  # mostly it comes back as it was said
            if echo.verbatim(n.response, m):
                return n.digests[-1]
        plain = history.step(before, m)
        theirs = history.reasoning(m)
        if not theirs and plain in self.by_history:
            return plain
        for n in known:
            if n.digests[-1] == plain and history.same_reasoning(history.reasoning(n.response), theirs):
                return plain
        for n in known:
            if echo.of(n.response, m):
                return n.digests[-1]
        return history.step(before, m, reasoning=theirs) if theirs else plain

    def fail(self, request_hash: str) -> None:
        if len(self.failed) >= _FAILED:
            self.failed.clear()
        self.failed.add(request_hash)

    def full(self, node: Node) -> np.ndarray:
        """Prompt and sampled ids of a node, int32 (n,)."""
        ids = self._full.get(node.id)
        if ids is None:
            ids = np.concatenate([self.prompt(node), node.sampled])
            self._full[node.id] = ids
            self.tokens += len(ids)
            if len(self._full) > _CACHED:
                self.tokens -= len(self._full.popitem(last=False)[1])
        self._full.move_to_end(node.id)
        return ids

    def prompt(self, node: Node) -> np.ndarray:
        """Prompt ids of a node, int32 (n,)."""
        # Walk up to the nearest ancestor that is put together already (or has no parent), then down again.
        path = [node]
        while path[-1].parent is not None and path[-1].shared and path[-1].parent.id not in self._full:
            path.append(path[-1].parent)
        top = path[-1]
        base = self._full[top.parent.id] if top.parent is not None and top.shared else arrays.ids([])
        prompt = np.concatenate([base[: top.shared], top.tail])
        for above, below in zip(reversed(path), reversed(path[:-1]), strict=False):
            prompt = np.concatenate([np.concatenate([prompt, above.sampled])[: below.shared], below.tail])
        return prompt


class Attempts:
    """Attempts in memory, the least recently used dropped above `limit` tokens (of 4 bytes), and the idle ones above an
    eighth of it: what is dropped is read again."""

    def __init__(self, limit: int = 128_000_000, idle: float = 600.0):
        self.limit, self.idle = limit, idle
        self._all: OrderedDict[str, Attempt] = OrderedDict()
        self._used: dict[str, float] = {}
        self._calls = 0

    def get(self, attempt_id: str) -> Attempt:
        attempt = self._all.get(attempt_id)
        if attempt is None:
            attempt = self._all[attempt_id] = Attempt(attempt_id)
        self._all.move_to_end(attempt_id)
        self._used[attempt_id] = time.monotonic()
        self._calls += 1
        if self._calls % 64 == 0:
            self._trim()
        return attempt

    def peek(self, attempt_id: str) -> Attempt | None:
        return self._all.get(attempt_id)

    def drop(self, attempt_id: str) -> None:
        self._all.pop(attempt_id, None)
        self._used.pop(attempt_id, None)

    def _trim(self) -> None:
        held = sum(a.tokens for a in self._all.values())
        stale = time.monotonic() - self.idle
        for key in list(self._all)[:-1]:
            full = held > self.limit or len(self._all) > 4096
            if not full and (held <= self.limit // 8 or self._used[key] > stale):
                return
            if not self._all[key].generations:
                held -= self._all[key].tokens
                self.drop(key)

    def __iter__(self):
        return iter(list(self._all.values()))
