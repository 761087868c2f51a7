"""What the proxy remembers of one attempt, to continue its conversations: rebuilt from the capture stream at any time."""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from polar import arrays
from polar.completion import Completion, Role
from polar.store.capture import AsyncCapture
from proxy import history
from proxy.neutral import Message

if TYPE_CHECKING:
    from proxy.generation import Generation

_CACHED = 4  # full token sequences kept per attempt; others are put together again when asked for


class Node(Struct, kw_only=True, eq=False):
    """A stored completion. `digests` covers its messages and, last, its response; `prompt_tail` and `sampled` are int32."""

    id: str
    parent: Node | None
    shared: int
    tail: np.ndarray
    sampled: np.ndarray
    digests: array
    response: Message
    model: str
    tools_hash: str
    request_hash: str
    role: Role
    whole: bool  # it ended by itself, so it can be delivered again
    delivered: bool
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
        self.by_call: dict[str, Node] = {}
        self.by_request: dict[str, list[Node]] = {}
        self.tokens = 0  # held in memory
        self._cursor = "-"
        self._lock = asyncio.Lock()
        self._full: OrderedDict[str, np.ndarray] = OrderedDict()

    async def sync(self, capture: AsyncCapture) -> None:
        """Take in what was stored since the last time, by this proxy or another."""
        async with self._lock:
            for entry, completion in await capture.read(self.id, self._cursor):
                self.add(completion)
                self._cursor = entry

    def add(self, c: Completion) -> Node | None:
        """Index a stored completion; None if its parent is unknown. Idempotent."""
        if c.completion_id in self.nodes:
            return self.nodes[c.completion_id]
        parent = self.nodes.get(c.parent_id) if c.parent_id else None
        if c.parent_id and parent is None:
            return None
        if c.message_shared and parent is not None:
            base = parent.digests[: c.message_shared + 1]
            digests = history.extend(base, c.messages)
        else:
            digests = history.chain(c.model, c.messages)
        node = Node(
            id=c.completion_id,
            parent=parent,
            shared=c.prompt_shared,
            tail=arrays.ids(c.prompt_tail),
            sampled=arrays.ids(c.sampled_ids),
            digests=history.extend(digests, [c.response]),
            response=c.response,
            model=c.model,
            tools_hash=c.tools_hash,
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
        for call in history.call_ids(node.response):
            self.by_call[call] = node
        self.tokens += len(node.tail) + len(node.sampled) + 4 * len(digests)
        return node

    def full(self, node: Node) -> np.ndarray:
        """Prompt and sampled ids of a node, int32 (n,)."""
        ids = self._full.get(node.id)
        if ids is None:
            ids = np.concatenate([self.prompt(node), node.sampled])
            self._full[node.id] = ids
            if len(self._full) > _CACHED:
                self._full.popitem(last=False)
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
    """Attempts in memory, the least recently used dropped above `limit` tokens: what is dropped is read again."""

    def __init__(self, limit: int = 128_000_000):
        self.limit = limit
        self._all: OrderedDict[str, Attempt] = OrderedDict()
        self._calls = 0

    def get(self, attempt_id: str) -> Attempt:
        attempt = self._all.get(attempt_id)
        if attempt is None:
            attempt = self._all[attempt_id] = Attempt(attempt_id)
        self._all.move_to_end(attempt_id)
        self._calls += 1
        if self._calls % 64 == 0:
            self._trim()
        return attempt

    def peek(self, attempt_id: str) -> Attempt | None:
        return self._all.get(attempt_id)

    def drop(self, attempt_id: str) -> None:
        self._all.pop(attempt_id, None)

    def _trim(self) -> None:
        held = sum(a.tokens for a in self._all.values())
        for key in list(self._all)[:-1]:
            if held <= self.limit and len(self._all) <= 4096:
                return
            if not self._all[key].generations:
                held -= self._all.pop(key).tokens

    def __iter__(self):
        return iter(list(self._all.values()))
