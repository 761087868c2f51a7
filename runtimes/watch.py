"""The two ways in which a running command is ended from outside: its deadline and its caller's wish."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL = 0.25  # seconds between two looks at `cancelled`


class Watch:
    """`expired()` turns true once, for good, and says why in `timed_out` or `was_cancelled`."""

    def __init__(self, timeout: float, cancelled: Callable[[], bool] | None):
        self.started = time.monotonic()
        self.deadline = self.started + timeout
        self.timed_out = False
        self.was_cancelled = False
        self._cancelled = cancelled
        self._next = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def wait(self) -> float:
        """Seconds that a caller may block before it must look again."""
        return max(0.0, min(POLL, self.deadline - time.monotonic()))

    def expired(self) -> bool:
        now = time.monotonic()
        if not (self.timed_out or self.was_cancelled):
            if now >= self.deadline:
                self.timed_out = True
            elif self._cancelled and now >= self._next:
                self._next = now + POLL
                self.was_cancelled = bool(self._cancelled())
        return self.timed_out or self.was_cancelled
