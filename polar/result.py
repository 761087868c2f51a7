"""How a session ends, and the object that says so."""

from __future__ import annotations

from typing import Any, Final, Literal

from msgspec import Struct, field

from polar.trace import Trajectory

SCHEMA: Final = 1

Termination = Literal[
    "finished",
    "agent_error",
    "agent_timeout",
    "turn_limit",
    "token_limit",
    "context_overflow",
    "cancelled",
    "infra_error",
]
Verdict = Literal["passed", "failed", "partial", "evaluator_error", "not_evaluated"]


class ErrorInfo(Struct, frozen=True, kw_only=True, omit_defaults=True):
    code: str
    message: str
    stage: str = ""
    retryable: bool = False


class Artifact(Struct, kw_only=True, omit_defaults=True):
    """A file kept from an attempt. `key` is its object; `truncated` when it was larger than the collection limit."""

    name: str
    key: str
    size: int
    truncated: bool = False


class Evaluation(Struct, kw_only=True, omit_defaults=True):
    """What the evaluator found. `outcome_reward` is none unless the work was really judged.
    `trace_rewards`, where given, has one entry per trace, or per call of a packed tree (none: use the outcome's)."""

    verdict: Verdict
    outcome_reward: float | None = None
    trace_rewards: list[float | None] | None = None
    evaluator: str = ""
    attempts: int = 1
    error: ErrorInfo | None = None
    report: dict[str, Any] = field(default_factory=dict)


class Usage(Struct, kw_only=True, omit_defaults=True):
    """Counted at the proxy. `uncaptured` are generations that a crash of the proxy cut off before they were stored."""

    turns: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    cached_tokens: int = 0
    uncaptured: int = 0


class LedgerLine(Struct, kw_only=True, omit_defaults=True):
    """One execution of a session. Every attempt leaves one, also those that failed; `artifacts` is what was kept of such a
    one."""

    session_id: str
    attempt: int
    node: str = ""
    termination: Termination = "finished"
    error: ErrorInfo | None = None
    started_at: float = 0.0
    ended_at: float = 0.0
    sampled_tokens: int = 0
    artifacts: list[Artifact] = field(default_factory=list)
    schema_version: Literal[1] = SCHEMA


class SessionResult(Struct, kw_only=True, eq=False, omit_defaults=True):
    """The self-contained result object of one session. `timing` maps stage names to seconds."""

    session_id: str
    task_id: str
    sample_index: int
    attempt: int
    termination: Termination
    verdict: Verdict = "not_evaluated"
    reward: float | None = None
    trajectory: Trajectory
    evaluation: Evaluation | None = None
    error: ErrorInfo | None = None
    usage: Usage = field(default_factory=Usage)
    timing: dict[str, float] = field(default_factory=dict)
    node: str = ""
    runtime: str = ""
    harness: str = ""
    model: str = ""
    instruction: str = ""
    results_queue: str = "results"
    num_samples: int = 1
    artifacts: list[Artifact] = field(default_factory=list)
    attempts: list[LedgerLine] = field(default_factory=list)
    agent: dict[str, Any] = field(default_factory=dict)  # exit code, notes of the harness adapter
    capture_key: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    created_at: float = 0.0
    finished_at: float = 0.0
    schema_version: Literal[1] = SCHEMA


def result_key(task_id: str, session_id: str, attempt: int) -> str:
    return f"results/{task_id}/{session_id}/{attempt}.msgpack.zst"


def capture_key(task_id: str, session_id: str, attempt: int) -> str:
    return f"capture/{task_id}/{session_id}/{attempt}.msgpack.zst"


def artifact_key(task_id: str, session_id: str, attempt: int, name: str) -> str:
    return f"artifacts/{task_id}/{session_id}/{attempt}/{name}"
