"""POSTRUN: traces are rebuilt, the outcome is judged, the result is written and committed exactly once."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from urllib.parse import quote

from polar.codec import compress, decompress, pack, unpack
from polar.completion import Completion
from polar.errors import EvaluatorError, LeaseLost, PolarError, Unreadable
from polar.ids import attempt_id
from polar.patience import AWAY
from polar.result import Evaluation, LedgerLine, SessionResult, Usage, capture_key, result_key
from polar.sandbox import SandboxRef
from polar.session import Session
from polar.store.sessions import Hint
from polar.task import BuilderSpec, TaskRequest
from polar.trace import Fidelity, Trajectory
from reconstruction.registry import build
from reconstruction.rewards import apply
from workers.admission import dispatch
from workers.app import queue_for, send
from workers.collect import keep_log
from workers.context import Context
from workers.failures import Shutdown, as_error, unread
from workers.judging import judge
from workers.leases import Held
from workers.report import RunReport

log = logging.getLogger("polar.postrun")

# A session whose POSTRUN took its worker down this often, or whose task nobody can read, is ended without evaluation.
MAX_TRIES = 5
_LOG_NAME = 120  # characters kept of the name of an evaluation's log
_GIVEN_UP = "POSTRUN took its worker down repeatedly, or no worker can read the task"


def postrun(ctx: Context, session_id: str) -> None:
    s = ctx.store.begin(session_id, "postrun", ctx.node, ctx.worker, ctx.settings.lease_seconds)
    if s is None:
        return
    with ctx.held(s) as held, ctx.folder() as folder:
        try:
            task = _task(ctx, s)
            result = _result(ctx, s, task, folder, held)
            ctx.persist(held, lambda: _commit(ctx, s, task, result))
        except LeaseLost:
            return
        except Exception as e:
            # The store or the object storage is away, or a bug of ours: nothing is lost, it is taken up again.
            error = as_error(e, "postrun")
            log.exception("postrun of %s: %s: %s", s.attempt_id, error.code, error.message)
            mode = "worker" if _passes(e) else "failed"
            ctx.persist(held, lambda: ctx.store.release(s.session_id, s.fence, mode))
            return
    dispatch(ctx)


def _passes(e: Exception) -> bool:
    """Whether it says nothing of the session: a store is away, or this worker ends. Such a try is as good as none."""
    return isinstance(e, (Shutdown, *AWAY)) or (isinstance(e, PolarError) and e.code == "store_unavailable")


def _task(ctx: Context, s: Session) -> TaskRequest:
    try:
        return ctx.store.task(s.task_id)
    except Unreadable:
        # A newer worker may take it up. If none does the session ends, for its trainer waits.
        if s.postrun_tries <= MAX_TRIES:
            raise
        return unread(s)


def _result(ctx: Context, s: Session, task: TaskRequest, folder: Path, held: Held) -> SessionResult:
    key = result_key(s.task_id, s.session_id, s.attempt)
    if written := _written(ctx, s, key):
        return written
    started = time.monotonic()
    report = unpack(s.run_report, RunReport) if s.run_report else RunReport(termination="finished")
    if s.termination:  # decided outside RUN: cancelled, or the retry budget is spent
        report.termination = s.termination  # type: ignore[assignment]
    if s.mode == "capture" or not s.run_report or report.termination == "infra_error":
        ctx.capture.revoke(s.attempt_id)
        report.uncaptured = ctx.capture.drain(s.attempt_id, ctx.settings.drain_seconds)
    completions = ctx.capture.read(s.attempt_id)
    trajectory, error = _rebuild(task, completions)
    rebuilt = time.monotonic()
    if s.postrun_tries > MAX_TRIES:
        evaluation = Evaluation(
            verdict="evaluator_error",
            error=as_error(PolarError(_GIVEN_UP, code="worker_lost"), "postrun"),
        )
    elif held.cancel.is_set() or s.cancel:
        evaluation = Evaluation(verdict="not_evaluated")
    else:
        evaluation = judge(ctx, s, task, report, trajectory, folder)
    judged = time.monotonic()
    if held.lost.is_set():
        raise LeaseLost(s.session_id)
    try:
        apply(trajectory, evaluation)
    except EvaluatorError as e:  # its rewards don't fit the traces
        evaluation = Evaluation(verdict="evaluator_error", evaluator=evaluation.evaluator, error=as_error(e, "postrun"))
    usage, _ = ctx.capture.usage(s.attempt_id)
    usage.uncaptured = report.uncaptured
    for path in sorted(p for p in folder.glob("try*/logs/*") if not p.is_symlink()):
        name = quote(os.fsencode(path.name))[-_LOG_NAME:]  # an evaluator may name it as the agent named a file
        report.artifacts += keep_log(ctx.objects, s, f"evaluation-{path.parent.parent.name}-{name}", path)
    result = SessionResult(
        session_id=s.session_id,
        task_id=s.task_id,
        sample_index=s.index,
        attempt=s.attempt,
        termination=report.termination,
        verdict=evaluation.verdict,
        reward=evaluation.outcome_reward,
        trajectory=trajectory,
        evaluation=evaluation,
        error=s.error if report.termination == "infra_error" else error,
        usage=usage,
        timing=timing(s, rebuild=rebuilt - started, evaluate=judged - rebuilt),
        node=s.node,
        runtime=_backend(s),
        harness=task.agent.harness or task.agent.import_path or "",
        model=task.agent.model_name,
        instruction=task.instruction,
        results_queue=task.results_queue,
        num_samples=task.num_samples,
        artifacts=report.artifacts,
        attempts=[*_failed_attempts(ctx, s), _line(s, report, usage)],
        agent={"exit_code": report.exit_code, "message": report.message, "notes": report.notes},
        metadata=task.metadata,
        labels=task.labels,
        created_at=s.created,
        finished_at=ctx.store.now(),
    )
    if ctx.settings.keep_capture and completions:
        result.capture_key = capture_key(s.task_id, s.session_id, s.attempt)
        ctx.objects.put(result.capture_key, compress(pack(completions)))
    data = compress(pack(result))
    if not ctx.objects.put_if_absent(key, data):
        if written := _written(ctx, s, key):
            return written
        ctx.objects.put(key, data)
    return result


def _written(ctx: Context, s: Session, key: str) -> SessionResult | None:
    """What a predecessor wrote that died before the commit. Not what a session of this name wrote whom the store has
    forgotten."""
    if not ctx.objects.exists(key):
        return None
    result = unpack(decompress(ctx.objects.get(key)), SessionResult)
    return result if result.created_at == s.created else None


def _rebuild(task: TaskRequest, completions: list[Completion]):
    """The trajectory, and the error of the asked-for builder if another had to stand in."""
    error = None
    for spec in (task.builder, BuilderSpec(strategy="per_request")):
        try:
            return build(spec, completions), error
        except Exception as e:  # a builder may be a user's
            error = as_error(e, "postrun")
            log.exception("builder %s failed", spec.strategy)
    lost = sum(len(c.sampled_ids) for c in completions)
    fidelity = Fidelity(
        completions=len(completions), sampled_tokens=lost, left_out={"reconstruction_failed": lost} if lost else {}
    )
    return Trajectory(builder="none", fidelity=fidelity), error


def _commit(ctx: Context, s: Session, task: TaskRequest, result: SessionResult) -> None:
    key = result_key(s.task_id, s.session_id, s.attempt)
    ended = ctx.store.commit(s, key, result.termination, result.verdict, result.reward, result.attempts[-1], task.group)
    for n in range(1, s.attempt + 1):
        ctx.capture.forget(attempt_id(s.session_id, n))
    send(ctx.app, [Hint(queue_for("postrun"), "postrun", other) for other in ended])
    log.info("session %s done: %s/%s reward=%s", s.session_id, result.termination, result.verdict, result.reward)


def _failed_attempts(ctx: Context, s: Session) -> list[LedgerLine]:
    """The ledger of the attempts before this one. Their token counts are read again: a generation that was in flight
    when an attempt failed is stored after its ledger line. One that failed, upon which the session was cancelled, is no
    earlier one."""
    lines = [line for line in ctx.store.ledger(s.session_id) if line.attempt < s.attempt]
    for line in lines:
        attempt = attempt_id(s.session_id, line.attempt)
        line.sampled_tokens = ctx.capture.usage(attempt)[0].sampled_tokens
        if ctx.settings.keep_capture and (completions := ctx.capture.read(attempt)):
            ctx.objects.put(capture_key(s.task_id, s.session_id, line.attempt), compress(pack(completions)))
    return lines


def _line(s: Session, report: RunReport, usage: Usage) -> LedgerLine:
    failed = report.termination == "infra_error"
    return LedgerLine(
        session_id=s.session_id,
        attempt=s.attempt,
        node=s.node,
        termination=report.termination,
        error=s.error if failed else None,
        started_at=s.admitted or s.created,
        ended_at=s.run_ended or time.time(),
        sampled_tokens=usage.sampled_tokens,
        artifacts=report.artifacts if failed else [],
    )


def timing(s: Session, **postrun: float) -> dict[str, float]:
    """Seconds per stage of the last attempt; `queue` is the wait for admission (all attempts before it included)."""
    marks = [
        ("queue", s.created, s.admitted),
        ("init_wait", s.admitted, s.init_started),
        ("init", s.init_started, s.ready_at),
        ("ready_wait", s.ready_at, s.run_started),
        ("run", s.run_started, s.run_ended),
        ("postrun_wait", s.run_ended, s.postrun_started),
    ]
    out = {name: round(end - start, 6) for name, start, end in marks if end >= start > 0}
    return out | {name: round(seconds, 6) for name, seconds in postrun.items()}


def _backend(s: Session) -> str:
    return unpack(s.sandbox, SandboxRef).backend if s.sandbox else s.backend
