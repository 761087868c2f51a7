"""INIT: a sandbox is created and prepared, then the session waits for a RUN slot as READY."""

from __future__ import annotations

import time

from redis.exceptions import RedisError

from polar.codec import pack
from polar.errors import InfraError, LeaseLost, NotFound
from polar.sandbox import Sandbox
from polar.session import Session
from polar.store.sessions import Hint
from polar.task import TaskRequest
from runtimes.prepare import run_prepare
from workers.app import queue_for, send
from workers.cleanup import discard
from workers.collect import keep_baseline
from workers.context import Context
from workers.failures import Shutdown, as_error, fail_attempt
from workers.judging import changes_under
from workers.leases import Held


def init(ctx: Context, session_id: str) -> None:
    s = ctx.store.begin(session_id, "init", ctx.node, ctx.worker, ctx.settings.lease_seconds)
    if s is None:
        return
    sandbox: Sandbox | None = None
    with ctx.held(s) as held:
        try:
            task = ctx.persist(held, lambda: ctx.store.task(s.task_id))
            sandbox = _prepare(ctx, s, task, held)
            if ctx.stopping.is_set():
                raise Shutdown("the worker was stopped")
            if held.lost.is_set():
                raise LeaseLost(s.session_id)
            ref = pack(sandbox.ref)
            state = ctx.persist(held, lambda: ctx.store.advance(s, "READY", sandbox=ref))
        except LeaseLost:
            if sandbox and not _handed_on(ctx, s, sandbox):
                discard(sandbox)
            return
        except Exception as e:
            if sandbox and not _handed_on(ctx, s, sandbox):
                discard(sandbox)
            # A step that was stopped for the worker's end has not failed by itself.
            error = Shutdown("the worker was stopped") if ctx.stopping.is_set() else e
            failed = as_error(error, "init")
            ctx.persist(held, lambda: fail_attempt(ctx, s, failed))
            return
    if state == "READY":
        send(ctx.app, [Hint(queue_for("run", ctx.node), "run", session_id)])
    else:
        discard(sandbox)
        send(ctx.app, [Hint(queue_for("postrun"), "postrun", session_id)])


def _prepare(ctx: Context, s: Session, task: TaskRequest, held: Held) -> Sandbox:
    deadline = time.monotonic() + task.timeout_seconds
    runtime = ctx.runtime(s.backend)
    labels = ctx.labels(s, "agent")
    sandbox = runtime.create(task.runtime, labels=labels, proxy=ctx.proxy, timeout=task.timeout_seconds)
    try:
        with ctx.folder() as folder:
            left = deadline - time.monotonic()
            if left <= 0:
                raise InfraError("creating the sandbox took the whole time budget", code="prepare_failed", stage="init")
            fetch = ctx.fetcher(folder)
            run_prepare(
                sandbox, task.runtime.prepare, timeout=left, fetch=fetch, cancelled=lambda: _unwanted(ctx, held)
            )
        if (under := changes_under(task)) is not None:
            keep_baseline(ctx.objects, sandbox, s, under)
    except BaseException:
        discard(sandbox)
        raise
    return sandbox


def _handed_on(ctx: Context, s: Session, sandbox: Sandbox) -> bool:
    """Whether the session is READY with this sandbox, or already further: the answer that said so may be lost. While nobody
    knows, the sandbox is left to the sweep."""
    try:
        now = ctx.store.session(s.session_id)
    except NotFound:
        return False
    except RedisError:
        return True
    return now.attempt_id == s.attempt_id and now.sandbox == pack(sandbox.ref)


def _unwanted(ctx: Context, held: Held) -> bool:
    return held.cancel.is_set() or held.lost.is_set() or ctx.stopping.is_set()
