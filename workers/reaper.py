"""The reaper: admission's doorbell, expired leases, lost messages, dead nodes. Several may run; all it does is atomic."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator

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


class Watch:
    """For how long the store was within reach of this process, without a break. Who lets a lease run out over an outage
    isn't dead: after one, and at first, everybody has a whole lease to be heard of again. That needs no word between reapers,
    for each finds the outage itself. What it can't tell from a dead worker is one that alone is cut off from the store."""

    def __init__(self, ctx: Context):
        self._ctx = ctx
        # A shorter break lets no lease run out: two thirds of it were left, or it was renewed in between.
        self._gap = max(ctx.settings.lease_seconds / 3, 2 * ctx.settings.reap_interval_seconds)
        self._since = self._last = -math.inf

    def __call__(self) -> float:
        """Seconds, as of now. Raises what the store does."""
        try:
            # Changes nothing, and is refused when a renewal would be: by a server that is full, or a replica.
            self._ctx.store.redis.zadd(self._ctx.keys.leases, {"": 0.0}, xx=True)
        except Exception:
            self._last = -math.inf
            raise
        now = time.monotonic()
        if now - self._last > self._gap:
            self._since = now
        self._last = now
        return now - self._since


def _always() -> float:
    return math.inf


def reap_forever(ctx: Context) -> None:
    due, watch = 0.0, Watch(ctx)
    retention = Retention(ctx.store, ctx.settings.keep_days)
    while not ctx.stopping.is_set():
        try:
            # The doorbell makes a submission start at once; the timeout makes the rounds regular.
            if ctx.store.redis.blpop([ctx.keys.doorbell], timeout=min(ctx.settings.reap_interval_seconds, 5.0)):
                dispatch(ctx)
            if time.monotonic() >= due:
                due = time.monotonic() + ctx.settings.reap_interval_seconds
                reap_once(ctx, watch)
                retention()
        except Exception as e:  # Redis away: go on when it is back
            log.warning("reaper: %s: %s", type(e).__name__, e)
            ctx.stopping.wait(1.0)


def reap_once(ctx: Context, watched: Callable[[], float] = _always) -> None:
    """One round. Silence counts only as far as the store was `watched` (seconds)."""
    _expired(ctx, watched)
    _dead_nodes(ctx, watched)
    dispatch(ctx)
    watched()
    _lost_hints(ctx)
    watched()
    _cleanup(ctx)


def _expired(ctx: Context, watched: Callable[[], float]) -> None:
    if watched() <= ctx.settings.lease_seconds:
        return
    for s in ctx.store.expired():
        if watched() <= ctx.settings.lease_seconds:
            return
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


def _dead_nodes(ctx: Context, watched: Callable[[], float]) -> None:
    if watched() <= ctx.settings.node_timeout_seconds:
        return
    now = ctx.store.now()
    for name, n in ctx.store.nodes().items():
        if n["ready"] and now - n["beat"] > ctx.settings.node_timeout_seconds:
            for s in ctx.store.waiting_on(name):
                if watched() <= ctx.settings.node_timeout_seconds:
                    return
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
