"""Sessions and tasks as the control plane shows them."""

from __future__ import annotations

from collections import Counter
from typing import Any

from polar.session import Session
from polar.store.sessions import SessionStore, TaskStatus

_MARKS = (
    ("queue", "created", "admitted"),
    ("init_wait", "admitted", "init_started"),
    ("init", "init_started", "ready_at"),
    ("ready_wait", "ready_at", "run_started"),
    ("run", "run_started", "run_ended"),
    ("postrun", "postrun_started", "done_at"),
)
_PRIVATE = {"sandbox", "run_report", "worker"}


def session_line(s: Session) -> dict[str, Any]:
    """One session in a list."""
    names = ("session_id", "index", "state", "attempt", "node", "termination", "verdict", "reward")
    return {n: getattr(s, n) for n in names}


def session_view(s: Session) -> dict[str, Any]:
    """Everything but what is the workers' own; `timing` in seconds per stage of the present attempt."""
    out = {f: getattr(s, f) for f in s.__struct_fields__ if f not in _PRIVATE}
    marks = ((name, getattr(s, start), getattr(s, end)) for name, start, end in _MARKS)
    return out | {"timing": {n: round(end - start, 6) for n, start, end in marks if end >= start > 0}}


def task_line(store: SessionStore, ids: list[str]) -> list[dict[str, Any]]:
    """Tasks in a list, without a look at their sessions."""
    fields = ("total", "done", "rewarded", "created", "finished", "queue")
    pipe = store.redis.pipeline(transaction=False)
    for t in ids:
        pipe.hmget(store.keys.task(t), *fields)
    out = []
    for t, h in zip(ids, pipe.execute(), strict=True):
        if h[0] is not None:
            total, done, rewarded = (int(x or 0) for x in h[:3])
            line = {"task_id": t, "total": total, "done": done, "rewarded": rewarded, "created": float(h[3])}
            out.append(line | {"finished": float(h[4] or 0), "queue": h[5].decode()})
    return out


def task_view(status: TaskStatus) -> dict[str, Any]:
    return {
        "task_id": status.task_id,
        "total": status.total,
        "done": status.done,
        "created": status.created,
        "finished": status.finished,
        "queue": status.queue,
        "states": dict(Counter(s.state for s in status.sessions)),
        "terminations": dict(Counter(s.termination for s in status.sessions if s.termination)),
        "verdicts": dict(Counter(s.verdict for s in status.sessions if s.verdict)),
        "sessions": [session_line(s) for s in status.sessions],
    }
