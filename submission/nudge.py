"""Sessions that came to wait for POSTRUN without a worker's message: the reaper announces them in its next round."""

from __future__ import annotations

from collections.abc import Iterable

from polar.store.sessions import SessionStore


def nudge(store: SessionStore, session_ids: Iterable[str]) -> None:
    """Make their hints overdue. Those that don't wait have none, and nothing happens to them."""
    overdue = {s: 0.0 for s in session_ids}
    if overdue:
        store.redis.zadd(store.keys.hints, overdue, xx=True)
