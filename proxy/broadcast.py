"""An answer in the making, and the clients that follow it."""

from __future__ import annotations

import asyncio

from proxy.failures import CallError
from proxy.neutral import Event


class Broadcast:
    """`events` grows until `done`; then either the last one is a Finish or `error` says what went wrong. `accepted`: the
    engine has the request. `rewritten` is set when the events were replaced after some had been sent: whoever has sent
    one must break off."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.error: CallError | None = None
        self.done = False
        self.ended = asyncio.Event()
        self.accepted = False
        self.rewritten = False
        self._cancel = asyncio.Event()
        self._cancel_reason = ""
        self._changed: asyncio.Future[None] | None = None
        self._listeners = 0

    def listen(self) -> None:
        self._listeners += 1

    def leave(self) -> None:
        """A client is served or gone. When the last one goes before the end, nobody wants the rest."""
        self._listeners -= 1
        if self._listeners <= 0 and not self.done:
            self.cancel("client went away")

    @property
    def followed(self) -> bool:
        return self._listeners > 0 and not self.cancelled

    def cancel(self, reason: str) -> None:
        if not self.done and not self._cancel.is_set():
            self._cancel_reason = reason
            self._cancel.set()

    @property
    def cancelled(self) -> bool:
        return self._cancel.is_set()

    async def change(self, seen: int, timeout: float) -> bool:
        """Wait until there are more than `seen` events or it is done; False at the timeout."""
        if len(self.events) > seen or self.done:
            return True
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        await asyncio.wait({self._changed}, timeout=timeout)
        return len(self.events) > seen or self.done

    def accept(self) -> None:
        """The engine has the request: nothing but a broken stream can tell its clients of a failure from here on."""
        self.accepted = True
        self._notify()

    def publish(self, events: list[Event]) -> None:
        if events:
            self.events += events
            self._notify()

    def close(self) -> None:
        self.done = True
        self.ended.set()
        self._notify()

    def _notify(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)
        self._changed = None
