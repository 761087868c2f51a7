"""Evaluation: the evaluator's fresh sandbox, its budget, its retries."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from evaluators.registry import load_evaluator
from polar.codec import pack, unpack
from polar.errors import EvaluatorError, PolarError
from polar.judge import Changes, Outcome
from polar.result import ErrorInfo, Evaluation
from polar.sandbox import LABEL_NODE, Sandbox, SandboxRef
from polar.session import Session
from polar.task import RuntimeSpec, TaskRequest
from polar.trace import Trajectory
from runtimes.prepare import run_prepare
from workers.cleanup import discard
from workers.collect import restore
from workers.context import Context
from workers.report import RunReport

log = logging.getLogger("polar.judging")

_ROOM_MB = 64  # for the evaluation's own files

# How a run may have ended for its outcome to be worth judging.
JUDGED = {"finished", "agent_error", "agent_timeout", "turn_limit", "token_limit", "context_overflow"}


def evaluator_paths(task: TaskRequest) -> list[str]:
    return list(load_evaluator(task.evaluator).collects) if task.evaluator else []


def changes_under(task: TaskRequest) -> str | None:
    """The folder whose changes the evaluator wants."""
    return getattr(load_evaluator(task.evaluator), "changes_under", None) if task.evaluator else None


def evaluation_spec(task: TaskRequest) -> RuntimeSpec:
    """By default the task's own, with room for all that an agent may have written and the archive that brings it: an agent
    that fills its disk is judged like any other."""
    assert task.evaluator is not None
    if task.evaluator.runtime:
        return task.evaluator.runtime
    disk = task.runtime.disk_mb
    return msgspec.structs.replace(task.runtime, disk_mb=disk * 2 + _ROOM_MB) if disk else task.runtime


def fresh_sandbox(ctx: Context, s: Session, task: TaskRequest, timeout: float) -> Sandbox:
    """A sandbox of the task's image with the evaluation's prepare steps done. It never reaches the proxy."""
    spec = evaluation_spec(task)
    runtime = ctx.runtime(spec.backend or s.backend)
    deadline = time.monotonic() + timeout
    sandbox = runtime.create(spec, labels=ctx.labels(s, "evaluation"), proxy=None, timeout=timeout)
    try:
        steps = spec.prepare if spec.evaluation_prepare is None else spec.evaluation_prepare
        with ctx.folder() as folder:
            run_prepare(sandbox, steps, timeout=max(0.1, deadline - time.monotonic()), fetch=ctx.fetcher(folder))
    except BaseException:
        discard(sandbox)
        raise
    return sandbox


class Prewarm:
    """An evaluation sandbox made beside RUN. A failure only means that POSTRUN makes its own."""

    def __init__(self, ctx: Context, s: Session, task: TaskRequest):
        self.sandbox: Sandbox | None = None
        self._taken = False
        self._thread = threading.Thread(target=self._make, args=(ctx, s, task), name="prewarm", daemon=True)
        self._thread.start()

    def _make(self, ctx: Context, s: Session, task: TaskRequest) -> None:
        try:
            self.sandbox = fresh_sandbox(ctx, s, task, task.evaluation_timeout_seconds)
        except Exception as e:
            log.warning("prewarm for %s failed: %s", s.attempt_id, e)

    def take(self) -> bytes:
        self._thread.join()
        self._taken = True
        return pack(self.sandbox.ref) if self.sandbox else b""

    def discard(self) -> None:
        if not self._taken:
            self._thread.join()
            if self.sandbox:
                discard(self.sandbox)


class NoPrewarm:
    def take(self) -> bytes:
        return b""

    def discard(self) -> None:
        pass


def prewarm(ctx: Context, s: Session, task: TaskRequest) -> Prewarm | NoPrewarm:
    wanted = task.evaluator is not None and task.evaluator.prewarm and load_evaluator(task.evaluator).needs_sandbox
    return Prewarm(ctx, s, task) if wanted else NoPrewarm()


def judge(
    ctx: Context, s: Session, task: TaskRequest, report: RunReport, trajectory: Trajectory, folder: Path
) -> Evaluation:
    """The verdict. Never raises for what an evaluator does: that is `evaluator_error`, with no reward."""
    if task.evaluator is None or report.termination not in JUDGED:
        return Evaluation(verdict="not_evaluated")
    name, tries = task.evaluator.name, task.evaluator.max_attempts
    deadline = time.monotonic() + task.evaluation_timeout_seconds
    error: ErrorInfo | None = None
    for attempt in range(1, tries + 1):
        if deadline - time.monotonic() <= 0:
            break
        try:
            evaluation = _once(ctx, s, task, report, trajectory, folder / f"try{attempt}", deadline, attempt)
            evaluation.evaluator, evaluation.attempts = name, attempt
            return evaluation
        except Exception as e:
            error = _error(e)
            log.warning(
                "evaluation of %s failed (%d of %d): %s: %s", s.attempt_id, attempt, tries, error.code, error.message
            )
            if not error.retryable or ctx.stopping.is_set():
                break
    error = error or ErrorInfo(code="evaluation_timeout", message="no time left to evaluate", stage="postrun")
    return Evaluation(verdict="evaluator_error", evaluator=name, attempts=attempt, error=error)


def _once(
    ctx: Context,
    s: Session,
    task: TaskRequest,
    report: RunReport,
    trajectory: Trajectory,
    folder: Path,
    deadline: float,
    n: int,
) -> Evaluation:
    assert task.evaluator is not None
    evaluator = load_evaluator(task.evaluator)
    folder.mkdir(parents=True)
    logs = folder / "logs"
    logs.mkdir()
    made: list[Sandbox] = []
    if n == 1 and report.prewarmed:
        ref = unpack(report.prewarmed, SandboxRef)
        if ref.labels.get(LABEL_NODE) == ctx.node:
            made.append(ctx.runtime(ref.backend).attach(ref))

    def another() -> Sandbox:
        made.append(fresh_sandbox(ctx, s, task, max(1.0, deadline - time.monotonic())))
        return made[-1]

    def sandbox() -> Sandbox:
        return made[0] if made else another()

    try:
        return evaluator.evaluate(
            Outcome(
                task=task,
                session_id=s.session_id,
                attempt=s.attempt,
                termination=report.termination,
                trajectory=trajectory,
                artifacts=restore(ctx.objects, report.collected, folder),
                changes=_changes(ctx, report, folder),
                sandbox=sandbox,
                another=another,
                remaining=lambda: deadline - time.monotonic(),
                logs=logs,
            )
        )
    finally:
        for box in made:
            discard(box)


def _changes(ctx: Context, report: RunReport, folder: Path) -> Changes | None:
    if report.changes is None:
        return None
    archive = folder / "changes.tar"
    ctx.objects.get_file(report.changes.key, archive)
    return Changes(under=report.changes.path, archive=archive, truncated=report.changes.truncated)


def _error(e: Exception) -> ErrorInfo:
    if isinstance(e, PolarError):
        return ErrorInfo(code=e.code, message=e.message, stage="postrun", retryable=e.retryable)
    bug = EvaluatorError(f"{type(e).__name__}: {e}", code="evaluator_bug")
    return ErrorInfo(code=bug.code, message=bug.message, stage="postrun", retryable=True)
