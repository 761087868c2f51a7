"""What was said earlier in a session, for requests that name it instead of sending it again.

Responses are in memory with the attempt's index. Whole conversations are not kept: they are put together from the capture
stream when one is asked for, page by page, so that a long session holds up nobody else.
"""

from __future__ import annotations

import asyncio
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct, field

from polar.store.capture import AsyncCapture, Grant
from proxy.attempt import Attempts
from proxy.dialects.base import INSTRUCTED, Cited, Recalled
from proxy.failures import unavailable
from proxy.neutral import Message
from proxy.store import ERRORS, Store

_PAGE = 8  # completions


class _Said(Struct, kw_only=True):
    """What of a stored completion a conversation is made of."""

    completion_id: str
    parent_id: str | None = None
    message_shared: int = 0
    messages: list[Any] = field(default_factory=list)
    response: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)


_decoder = msgspec.msgpack.Decoder(_Said)


class Recall:
    def __init__(self, capture: AsyncCapture, store: Store, attempts: Attempts):
        self._capture, self._store, self._attempts = capture, store, attempts
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def __call__(self, grant: Grant, cited: Cited) -> Recalled:
        """What the session has of it. Raises CallError if it has ended or the store can't be asked."""
        await self._store.check_open(grant)
        attempt = self._attempts.get(grant.attempt_id)
        if not cited.items <= attempt.nodes.keys():
            await self._store.sync(attempt)  # another proxy may have served it, or this one was started again
        nodes = attempt.nodes
        responses = {i: nodes[i].response for i in cited.items if i in nodes}
        if not cited.after:
            return Recalled(responses=responses)
        # One after the other in a session: each reads all of its stream.
        async with self._reading.setdefault(grant.attempt_id, asyncio.Lock()):
            try:
                known = await self._read(grant.attempt_id, cited.after)
            except ERRORS as e:
                raise unavailable("the session store is not reachable", "store_unavailable", 2) from e
        conversation, instructed = _conversation(known, cited.after)
        return Recalled(responses=responses, conversation=conversation, instructed=instructed)

    async def _read(self, attempt_id: str, upto: str) -> dict[str, _Said]:
        """Completions by id, in order, none behind `upto`."""
        key, after, out = self._capture.keys.capture(attempt_id), "-", {}
        while page := await self._capture.redis.xrange(key, min=after, count=_PAGE):
            for entry, stored in page:
                said = _decoder.decode(stored[b"c"])
                out[said.completion_id] = said
                if said.completion_id == upto:
                    return out
                after = f"({entry.decode()}"
        return out


def _conversation(known: dict[str, _Said], last: str) -> tuple[list[Message], bool]:
    """All messages up to the response of completion `last`, and whether the first was an instruction for it alone; nothing
    if it isn't known."""
    if last not in known:
        return [], False
    path = [known[last]]
    while path[-1].message_shared:
        above = known.get(path[-1].parent_id or "")
        if above is None:
            return [], False
        path.append(above)
    out: list[Message] = []
    for said in reversed(path):
        del out[said.message_shared :]
        out += [*said.messages, said.response]
    # Answers may read the same: this says which is meant.
    out[-1] = {**out[-1], "refs": [last]}
    return out, INSTRUCTED in known[last].labels
