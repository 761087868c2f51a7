"""How an attempt ends when the machinery failed: ledger line, retry or POSTRUN, cleanup."""

from __future__ import annotations

import logging
import time

from polar.codec import pack, to_json
from polar.errors import InfraError, LeaseLost, NotFound, PolarError, Unreadable
from polar.result import Artifact, ErrorInfo, LedgerLine
from polar.session import Session
from polar.store.sessions import Hint
from polar.task import AgentSpec, TaskRequest
from workers.admission import dispatch
from workers.app import queue_for, send
from workers.context import Context
from workers.report import RunReport

log = logging.getLogger("polar.failures")


def as_error(e: BaseException, stage: str) -> ErrorInfo:
    """Any exception as a stable code. What is not ours is `internal`: a bug, and worth another attempt."""
    if isinstance(e, PolarError):
        return ErrorInfo(code=e.code, message=e.message, stage=e.stage or stage, retryable=e.retryable)
    return ErrorInfo(code="internal", message=f"{type(e).__name__}: {e}", stage=stage, retryable=True)


def fail_attempt(
    ctx: Context, s: Session, error: ErrorInfo, mode: str = "worker", artifacts: list[Artifact] | None = None
) -> str:
    """Give the session a new attempt while its retry budget lasts, else end it. Returns `retry`, `postrun`, `stale`.
    `artifacts` is what RUN kept: the attempt's ledger line names it, and the result if this was the last one."""
    try:
        task = ctx.store.task(s.task_id)
    except NotFound:
        return "stale"
    except Unreadable as e:  # which may be what failed: another worker can read it, or none
        task, error = unread(s), as_error(e, error.stage)
    usage, _ = ctx.capture.usage(s.attempt_id)
    line = LedgerLine(
        session_id=s.session_id,
        attempt=s.attempt,
        node=s.node,
        termination="infra_error",
        error=error,
        started_at=s.admitted,
        ended_at=time.time(),
        sampled_tokens=usage.sampled_tokens,
        artifacts=artifacts or [],
    )
    retry = task.retry.allows(error.code, error.retryable, s.attempt)
    delay = task.retry.backoff_seconds * 2 ** max(0, s.attempt - 1)
    if artifacts and not retry:
        outcome = _end(ctx, s, error, artifacts)
    else:
        outcome = ctx.store.fail(s, line, error, retry=retry, delay=min(delay, 600), mode=mode)
    if outcome != "stale":
        # Only now is it sure that the attempt is over. Its agent may still run, and must not sample on.
        ctx.capture.revoke(s.attempt_id)
    level = logging.WARNING if outcome != "stale" else logging.INFO
    log.log(
        level, "attempt %s failed in %s: %s: %s -> %s", s.attempt_id, error.stage, error.code, error.message, outcome
    )
    if outcome == "postrun":
        send(ctx.app, [Hint(queue_for("postrun"), "postrun", s.session_id)])
    dispatch(ctx)
    return outcome


def unread(s: Session) -> TaskRequest:
    """What stands for a task that this worker can't read: what the session's record tells of it."""
    return TaskRequest(task_id=s.task_id, agent=AgentSpec(harness="unknown"), instruction="", results_queue=s.queue)


def _end(ctx: Context, s: Session, error: ErrorInfo, artifacts: list[Artifact]) -> str:
    """RUN goes to POSTRUN as any other does: with a report, from which the result has its artifacts."""
    report = pack(RunReport(termination="infra_error", artifacts=artifacts))
    try:
        ctx.store.advance(s, "POSTRUN", run_report=report, error=to_json(error), termination="infra_error")
    except LeaseLost:
        return "stale"
    return "postrun"


class Shutdown(InfraError):
    """The worker was asked to end; the session goes on elsewhere."""

    code = "worker_shutdown"
