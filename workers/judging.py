"""Evaluation: the evaluator's fresh sandbox, its budget, its retries."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

import msgspec

from evaluators.judgement import checked, printable
from evaluators.registry import load_evaluator
from polar.codec import pack, unpack
from polar.errors import EvaluatorError, PolarError
from polar.judge import Changes, Outcome
from polar.result import ErrorInfo, Evaluation
from polar.sandbox import LABEL_NODE, Sandbox, SandboxRef
from polar.session import Session
from polar.task import RuntimeSpec, TaskRequest
from polar.trace import Trajectory
from reconstruction.rewards import UNJUDGED
from runtimes.prepare import run_prepare
from workers.cleanup import discard
from workers.collect import restore
from workers.context import Context
from workers.failures import Shutdown
from workers.report import RunReport

log = logging.getLogger("polar.judging")

T = TypeVar("T")

_ROOM_MB = 64  # for the evaluation's own files
_OVERTIME = 60.0  # seconds beyond its budget after which an evaluator is held not to return
_PROBE = 10.0  # seconds that a prewarmed sandbox may take to show that it works

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
    """The verdict. Never raises for what an evaluator does: that is `evaluator_error`, with no reward. Raises Shutdown if it
    failed while the worker ends."""
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
            if evaluation.verdict in UNJUDGED:
                evaluation.outcome_reward = evaluation.trace_rewards = None
            return evaluation
        except Exception as e:
            error = _error(e)
            log.warning(
                "evaluation of %s failed (%d of %d): %s: %s", s.attempt_id, attempt, tries, error.code, error.message
            )
            if not error.retryable:
                break
            if ctx.stopping.is_set():  # it may have failed for that
                raise Shutdown("the worker was stopped during the evaluation") from e
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
    prewarmed = _prewarmed(ctx, s, report) if n == 1 and report.prewarmed else None
    boxes = _Boxes(lambda: fresh_sandbox(ctx, s, task, max(1.0, deadline - time.monotonic())), prewarmed)
    try:
        outcome = Outcome(
            task=task,
            session_id=s.session_id,
            attempt=s.attempt,
            termination=report.termination,
            trajectory=trajectory,
            artifacts=restore(ctx.objects, report.collected, folder),
            changes=_changes(ctx, report, folder),
            sandbox=boxes.first,
            another=boxes.another,
            remaining=lambda: deadline - time.monotonic(),
            logs=logs,
        )
        return checked(_returned(lambda: evaluator.evaluate(outcome), deadline + _OVERTIME))
    finally:
        boxes.close()


def _prewarmed(ctx: Context, s: Session, report: RunReport) -> Sandbox | None:
    """The sandbox made beside RUN, if it works. Never for a POSTRUN that is taken up again: the one before may have put the
    agent's work there, and what is then found is no patch. On another node it is left to that node's sweep."""
    try:
        ref = unpack(report.prewarmed, SandboxRef)
        if ref.labels.get(LABEL_NODE) != ctx.node:
            return None
        box = ctx.runtime(ref.backend).attach(ref)
    except Exception as e:
        log.warning("prewarmed sandbox of %s: %s: %s", s.attempt_id, type(e).__name__, e)
        return None
    try:
        if s.postrun_tries == 1 and box.exec("true", timeout=_PROBE).exit_code == 0:
            return box
    except Exception as e:
        log.warning("prewarmed sandbox of %s: %s: %s", s.attempt_id, type(e).__name__, e)
    discard(box)
    return None


class _Boxes:
    """The sandboxes of one evaluation. None is made once it is closed: an evaluator that was given up may still ask."""

    def __init__(self, make: Callable[[], Sandbox], first: Sandbox | None):
        self._make, self._first = make, first
        self._made = [first] if first else []
        self._closed = False
        self._lock = threading.Lock()

    def first(self) -> Sandbox:
        if self._first is None:
            self._first = self.another()
        return self._first

    def another(self) -> Sandbox:
        box = None if self._closed else self._make()
        with self._lock:
            if box and not self._closed:
                self._made.append(box)
                return box
        if box:
            discard(box)
        raise EvaluatorError("its evaluation is over", code="evaluation_timeout", retryable=False)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for box in self._made:
            discard(box)


def _returned(work: Callable[[], T], deadline: float) -> T:
    """What `work` returns or raises. No thread can be ended: one that isn't back in time stays behind, and its session goes
    on without it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:
            future.set_exception(e)

    threading.Thread(target=run, name="evaluate", daemon=True).start()
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError as e:
        if future.done():
            raise  # its own
        raise EvaluatorError("the evaluator did not return", code="evaluation_timeout", retryable=False) from e
    except Exception:
        raise
    except BaseException as e:  # sys.exit in a user's code ends no worker
        raise EvaluatorError(f"{type(e).__name__}: {e}", code="evaluator_bug") from e


def _changes(ctx: Context, report: RunReport, folder: Path) -> Changes | None:
    if report.changes is None:
        return None
    archive = folder / "changes.tar"
    ctx.objects.get_file(report.changes.key, archive)
    return Changes(under=report.changes.path, archive=archive, truncated=report.changes.truncated)


def _error(e: Exception) -> ErrorInfo:
    """As a result can hold it: an agent's files may speak in it."""
    if isinstance(e, PolarError):
        code, message, retryable = str(e.code), str(e.message), bool(e.retryable)
    else:
        code, message, retryable = "evaluator_bug", f"{type(e).__name__}: {e}", True
    return ErrorInfo(code=printable(code), message=printable(message), stage="postrun", retryable=retryable)
