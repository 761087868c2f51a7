"""How many calls may be open at once, so that one session can't take the service from the others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from weakref import WeakValueDictionary

from msgspec import Struct

from proxy.failures import unavailable
from proxy.metrics import Metrics

LARGE = 4 << 20  # bodies above this, or of unknown length, are read one after the other in each session


class Limits(Struct, frozen=True, kw_only=True):
    """Of one process. A call counts from its headers to the end of its answer, whether it samples, joins or waits."""

    calls_per_attempt: int = 64
    calls: int = 4096
    large_bodies: int = 16
    connections: int = 8192


class Gate:
    def __init__(self, limits: Limits, metrics: Metrics):
        self.limits, self._metrics = limits, metrics
        self._open: dict[str, int] = {}
        self._all = 0
        self._reading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._large = asyncio.Semaphore(limits.large_bodies)

    @contextlib.contextmanager
    def call(self, attempt_id: str) -> Iterator[None]:
        """Raises CallError (unavailable, with a time to try again after) over a limit."""
        own = self._open.get(attempt_id, 0)
        if own >= self.limits.calls_per_attempt:
            self._refuse("session", f"this session has {own} calls open, the most it may")
        if self._all >= self.limits.calls:
            self._refuse("process", "the proxy has as many calls open as it may")
        self._open[attempt_id] = own + 1
        self._all += 1
        try:
            yield
        finally:
            self._all -= 1
            left = self._open[attempt_id] - 1
            if left:
                self._open[attempt_id] = left
            else:
                del self._open[attempt_id]

    @contextlib.asynccontextmanager
    async def body(self, attempt_id: str, size: int | None) -> AsyncIterator[None]:
        """Around the reading of a body of `size` bytes (None: not said)."""
        if size is not None and size <= LARGE:
            yield
            return
        lock = self._reading.setdefault(attempt_id, asyncio.Lock())
        async with lock:
            if size is None:
                yield
                return
            async with self._large:
                yield

    def _refuse(self, limit: str, why: str) -> None:
        self._metrics.refused.labels(limit).inc()
        raise unavailable(why, "too_many_calls", 1)
