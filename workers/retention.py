"""What the store forgets: tasks that ended long ago. Their results stay in the object storage."""

from __future__ import annotations

import logging
import time

from polar.store.sessions import SessionStore

log = logging.getLogger("polar.retention")

EVERY = 600.0  # seconds between two looks
_PAGE = 200  # tasks forgotten in one round: the reaper has other things to do


class Retention:
    """Called with every round of the reaper; does its work now and then. `days` 0: nothing is forgotten."""

    def __init__(self, store: SessionStore, days: float):
        self._store, self._days = store, days
        self._due = 0.0

    def __call__(self) -> None:
        if self._days and time.monotonic() >= self._due:
            gone = forget(self._store, self._store.now() - self._days * 86400, _PAGE)
            if gone:
                log.info("forgot %d tasks that ended more than %g days ago", gone, self._days)
            if gone < _PAGE:
                self._due = time.monotonic() + EVERY


def forget(store: SessionStore, before: float, most: int = 1 << 30) -> int:
    """Remove tasks that ended before then (Unix seconds), and what their results queues still hold from before. How many:
    about `most` in one call."""
    queues: set[str] = set()
    gone = kept = 0
    while gone < most and (ids := store.redis.zrangebyscore(store.keys.tasks, "-inf", before, start=kept, num=_PAGE)):
        for task_id in ids:
            if queue := store.forget(task_id.decode(), before):
                queues.add(queue)
                gone += 1
            else:
                kept += 1
    oldest = f"{int(before * 1000)}-0"
    for queue in queues:
        for stream in (store.keys.results(queue), store.keys.groups(queue)):
            store.redis.xtrim(stream, minid=oldest, approximate=False)
    return gone
