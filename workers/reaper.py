"""The reaper: admission's doorbell, expired leases, lost messages, dead nodes. Several may run; all it does is atomic."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator

import redis.exceptions

from polar.errors import PolarError
from polar.result import ErrorInfo
from polar.session import Session
from polar.store.sessions import Hint
from workers.admission import dispatch
from workers.app import queue_for, send
from workers.cleanup import GONE_SECONDS
from workers.context import Context
from workers.failures import fail_attempt
from workers.retention import Retention

log = logging.getLogger("polar.reaper")

_PAGE = 500


def reap_forever(ctx: Context) -> None:
    due = 0.0
    retention = Retention(ctx.store, ctx.settings.keep_days)
    while not ctx.stopping.is_set():
        try:
            # The doorbell makes a submission start at once; the timeout makes the rounds regular.
            if ctx.store.redis.blpop([ctx.keys.doorbell], timeout=ctx.settings.reap_interval_seconds):
                dispatch(ctx)
            if time.monotonic() >= due:
                due = time.monotonic() + ctx.settings.reap_interval_seconds
                reap_once(ctx)
                retention()
        except Exception as e:  # Redis away: go on when it is back
            log.warning("reaper: %s: %s", type(e).__name__, e)
            ctx.stopping.wait(1.0)


def reap_once(ctx: Context) -> None:
    _expired(ctx)
    _dead_nodes(ctx)
    dispatch(ctx)
    _lost_hints(ctx)
    _cleanup(ctx)


def _expired(ctx: Context) -> None:
    for s in ctx.store.expired():
        with _alone(s):
            _expire(ctx, s)


def _expire(ctx: Context, s: Session) -> None:
    if s.state in ("INITIALIZING", "RUNNING") and s.mode == "managed":
        stage = "init" if s.state == "INITIALIZING" else "run"
        error = ErrorInfo(
            code="worker_lost", message=f"worker {s.worker} stopped renewing", stage=stage, retryable=True
        )
        fail_attempt(ctx, s, error, mode="expired")
    elif ctx.store.release(s.session_id, s.fence, mode="expired"):
        log.warning("postrun of %s is taken up again (worker %s)", s.attempt_id, s.worker)
        send(ctx.app, [hint(s.session_id, "POSTRUN", "")])


@contextlib.contextmanager
def _alone(s: Session) -> Iterator[None]:
    """What is wrong with one session stops no other's."""
    try:
        yield
    except (redis.exceptions.RedisError, OSError):
        raise
    except Exception:
        log.exception("reaping session %s", s.session_id)


def _dead_nodes(ctx: Context) -> None:
    now = ctx.store.now()
    for name, n in ctx.store.nodes().items():
        if n["ready"] and now - n["beat"] > ctx.settings.node_timeout_seconds:
            for s in ctx.store.waiting_on(name):
                error = ErrorInfo(
                    code="node_lost", message=f"node {name} gave no sign of life", stage="ready", retryable=True
                )
                with _alone(s):
                    fail_attempt(ctx, s, error, mode="waiting")


def _lost_hints(ctx: Context) -> None:
    """Announce again what waits too long, unless its queue still holds as many messages as there are waiting sessions."""
    waiting: dict[str, list[Session]] = defaultdict(list)
    for s in ctx.store.overdue_hints(ctx.settings.hint_overdue_seconds):
        waiting[hint(s.session_id, s.state, s.node).queue].append(s)
    for queue, sessions in waiting.items():
        missing = len(sessions) - depth(ctx, queue)
        if missing <= 0:
            continue
        log.info("announcing %d sessions again on %s", missing, queue)
        again = sessions[:missing]
        send(ctx.app, [hint(s.session_id, s.state, s.node) for s in again])
        ctx.store.hinted_again(s.session_id for s in again)


def _cleanup(ctx: Context) -> None:
    """Tell nodes what to remove. One that is gone for long is told nothing: what it left is found by its labels."""
    now = ctx.store.now()
    known = {name for name, told in ctx.store.nodes().items() if now - told["beat"] <= GONE_SECONDS}
    nodes: dict[str, set[str]] = defaultdict(set)
    stale = []
    for member, _ in ctx.store.redis.zscan_iter(ctx.keys.cleanup, count=_PAGE):
        node, _, attempt = member.decode().partition("|")
        if node not in known:
            stale.append(member)
        elif len(nodes[node]) < _PAGE:
            nodes[node].add(attempt)
    for n in range(0, len(stale), _PAGE):
        ctx.store.redis.zrem(ctx.keys.cleanup, *stale[n : n + _PAGE])
    for node, attempts in nodes.items():
        queue = queue_for("cleanup", node)
        if depth(ctx, queue) == 0:
            send(ctx.app, [Hint(queue, "cleanup", a) for a in attempts])


def hint(session_id: str, state: str, node: str) -> Hint:
    """The message that a waiting session needs."""
    stage = {"ADMITTED": "init", "READY": "run"}.get(state, "postrun")
    return Hint(queue_for(stage, node if stage != "postrun" else ""), stage, session_id)


def depth(ctx: Context, queue: str) -> int:
    """Messages that wait in a queue; 0 when the broker can't say."""
    try:
        with ctx.app.connection_for_read() as connection:
            # Not a passive declaration: under a key prefix kombu's Redis transport finds no queue at all.
            return connection.default_channel.queue_declare(queue).message_count
    except (PolarError, OSError):
        raise
    except Exception as e:
        log.debug("depth of %s: %s", queue, e)
        return 0
