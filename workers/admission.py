"""Admission: pending sessions get a READY place on a node. Runs after every event that frees a place."""

from __future__ import annotations

from polar.store.sessions import Hint
from workers.app import queue_for, send
from workers.context import Context


def dispatch(ctx: Context) -> int:
    """Admit what fits now and announce it. Safe to run anywhere, any number of times at once."""
    admitted = ctx.store.admit(ctx.settings.postrun_limit, ctx.settings.node_timeout_seconds)
    send(ctx.app, [Hint(queue_for("init", node), "init", sid) for sid, node in admitted])
    return len(admitted)
