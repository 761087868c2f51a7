"""Our results as the reference server would report them (blocking: reads the result objects)."""

from __future__ import annotations

from typing import Any

from api import compat_models as ref
from api.control import Control
from polar.errors import NotFound, PolarError
from polar.export import read_result, rows
from polar.result import SessionResult
from polar.session import Session
from polar.store.sessions import TaskStatus
from polar.trace import Trace

_JUDGED = {"passed", "failed", "partial"}
_TIMING = {"queue": "register_to_init_queue_ms", "init": "init_ms", "run": "run_ms"}


def task_result(c: Control, task: str) -> ref.TaskResult:
    """The body of a callback. Raises NotFound, or PolarError when the object store is away."""
    status = c.store.task_status(task)
    results = _results(c, status)
    return ref.TaskResult(task_id=task, status=_status(status, results), results=results)  # type: ignore[arg-type]


def task_status(c: Control, task: str) -> ref.TaskStatus:
    status = c.store.task_status(task)
    results = _results(c, status)
    return ref.TaskStatus(
        task_id=task,
        status=_status(status, results),  # type: ignore[arg-type]
        results=results,
        total_sessions=status.total,
        completed_sessions=len(results),
    )


def _results(c: Control, status: TaskStatus) -> list[ref.SessionResult]:
    return [_read(c, s) for s in status.sessions if s.state == "DONE"]


def _status(status: TaskStatus, results: list[ref.SessionResult]) -> str:
    if len(results) < status.total:
        return "running" if any(s.state != "PENDING" for s in status.sessions) else "pending"
    return "failed" if all(r.status == "ERROR" for r in results) else "completed"


def _read(c: Control, s: Session) -> ref.SessionResult:
    try:
        return session_result(read_result(c.objects, s.result))
    except PolarError as e:
        if e.retryable:
            raise
        gone = "result_missing" if isinstance(e, NotFound) else e.code
        error = f"{gone}: {e.message}"
        trajectory = ref.Trajectory(status="ERROR", error=error)
        return ref.SessionResult(
            session_id=s.session_id, task_id=s.task_id, status="ERROR", trajectory=trajectory, error=error
        )


def session_result(r: SessionResult) -> ref.SessionResult:
    status = _session_status(r)
    error = _error(r) if status == "ERROR" else None
    f = r.trajectory.fidelity
    trajectory = ref.Trajectory(
        status=status,
        metadata={
            "builder": r.trajectory.builder,
            "record_count": f.completions,
            "trace_count": f.traces,
            "evaluation": r.evaluation.report if r.evaluation else {},
        },
        traces=[_trace(t, r.reward, r.metadata) for t in rows(r.trajectory)],
        error=error,
    )
    timing = {theirs: round(1000 * r.timing[ours], 3) for ours, theirs in _TIMING.items() if ours in r.timing}
    timing["postrun_ms"] = round(1000 * (r.timing.get("rebuild", 0.0) + r.timing.get("evaluate", 0.0)), 3)
    return ref.SessionResult(
        session_id=r.session_id,
        task_id=r.task_id,
        status=status,
        trajectory=trajectory,
        timing=timing,
        node_id=r.node or None,
        error=error,
        metadata={**r.metadata, "termination": r.termination, "verdict": r.verdict, "attempts": r.attempt},
    )


def _session_status(r: SessionResult) -> ref.Status:
    """COMPLETED only for work that may be trained on: a failure of the machinery or of the judge never looks like a
    zero."""
    if r.termination in ("infra_error", "cancelled") or r.verdict == "evaluator_error":
        return "ERROR"
    if r.termination == "agent_timeout":
        return "TIMEOUT"
    if r.termination == "agent_error" and r.verdict not in _JUDGED:
        return "ERROR"
    return "COMPLETED"


def _error(r: SessionResult) -> str:
    found: Any = r.error or (r.evaluation.error if r.evaluation else None)
    if r.termination == "cancelled":
        return "session cancelled"
    return f"{found.code}: {found.message}" if found else r.termination


def _trace(t: Trace, outcome: float | None, metadata: dict[str, Any]) -> ref.Trace:
    copied: dict[str, Any] = {k: metadata[k] for k in ("group_id", "policy_version", "rollout_step") if k in metadata}
    return ref.Trace(
        prompt_ids=t.prompt_ids,
        response_ids=t.response_ids,
        loss_mask=t.loss_mask,
        finish_reason=t.finish_reason,
        response_logprobs=t.logprobs,
        reward=t.reward if t.reward is not None else outcome,
        metadata={**t.metadata, **copied, "role": t.role, "weight": t.weight, "versions": t.versions},
    )
