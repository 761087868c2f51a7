"""Whose a warm sandbox is. An engine's labels can't be changed, so what it was made with is overruled by a record in Redis.

One field per sandbox decides everything: who sets it first has it. A task's labels hand it out, no labels condemn it. So a
sandbox is handed out once, and never while a janitor that takes its worker for dead is removing it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polar.codec import from_json, to_json
from polar.store.keys import Keys

Labels = dict[str, str]
_CONDEMNED: Labels = {}


class Ledger:
    """Of one back-end on one node. `seconds`: how long an owner counts as alive after it signed."""

    def __init__(self, client: Any, keys: Keys, node: str, backend: str, seconds: float):
        self._redis, self._keys, self.seconds = client, keys, seconds
        self._records = keys.warm(node, backend)

    def sign(self, owner: str) -> None:
        self._redis.set(self._keys.warm_owner(owner), 1, px=int(self.seconds * 1000))

    def leave(self, owner: str) -> None:
        self._redis.delete(self._keys.warm_owner(owner))

    def lives(self, owner: str) -> bool:
        return bool(self._redis.exists(self._keys.warm_owner(owner)))

    def adopt(self, handle: str, labels: Labels) -> bool:
        """The sandbox carries `labels` from now on. False: it is somebody else's, or condemned."""
        return bool(self._redis.hsetnx(self._records, handle, to_json(labels)))

    def condemn(self, handle: str) -> bool:
        """Nobody gets the sandbox any more, and the caller may destroy it. False: it was handed out."""
        nothing = to_json(_CONDEMNED)
        return bool(self._redis.hsetnx(self._records, handle, nothing)) or (
            self._redis.hget(self._records, handle) == nothing
        )

    def records(self) -> dict[str, Labels]:
        """By handle; empty labels: condemned."""
        found = self._redis.hgetall(self._records)
        return {handle.decode(): from_json(labels, Labels, "warm record") for handle, labels in found.items()}

    def forget(self, handles: Iterable[str]) -> None:
        if handles := list(handles):
            self._redis.hdel(self._records, *handles)
