"""Repeating a Redis call over an outage of the server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import redis

from polar.errors import PolarError

log = logging.getLogger("polar.store")
T = TypeVar("T")

# What the server, or the way to it, is over when it is back. A full one takes no writes until something is removed.
AWAY = (
    redis.ConnectionError,
    redis.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
)


def _nothing() -> None:
    pass


def patiently(
    call: Callable[[], T], deadline: float | None, *, rejoin: Callable[[], None] = _nothing, stopped: Callable[[], bool]
) -> T:
    """The answer of `call`, which must be safe to repeat, tried until `deadline` (monotonic; None: for ever). `rejoin` is
    called when the server says that its consumer group is gone. Raises PolarError `store_unavailable` at the end."""
    pause, lost = 0.05, False
    while True:
        try:
            if lost:
                rejoin()
                lost = False
            return call()
        except redis.RedisError as e:
            lost = lost or "NOGROUP" in str(e)
            if not lost and not isinstance(e, AWAY):
                raise
            if stopped() or (deadline is not None and time.monotonic() + pause > deadline):
                raise PolarError(f"the session store is away: {e}", code="store_unavailable", retryable=True) from e
            log.warning("the session store is away, trying again: %s", e)
        time.sleep(pause)
        pause = min(2.0, pause * 2)
