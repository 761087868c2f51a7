"""The evaluator contract: the outcome of an attempt goes in, a verdict and rewards come out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from msgspec import Struct

from polar.result import Evaluation, Termination
from polar.sandbox import Sandbox
from polar.task import TaskRequest
from polar.trace import Trajectory


class Changes(Struct, kw_only=True, frozen=True):
    """What the agent changed below a folder of its sandbox: an archive that `polar.changes` reads and applies. Of a
    `truncated` one something is missing."""

    under: str
    archive: Path
    truncated: bool = False


class Outcome(Struct, kw_only=True):
    """What an evaluator gets. `sandbox()` makes (once) the fresh sandbox with `evaluation_prepare` done and the
    artifacts of the attempt restored by the evaluator itself through `artifacts` (host paths by sandbox path, as given).
    `another()` makes a further one on each call, for runs that must not see each other. All are removed afterwards.
    `remaining()` is the number of seconds left of the evaluation's budget."""

    task: TaskRequest
    session_id: str
    attempt: int
    termination: Termination
    trajectory: Trajectory
    artifacts: dict[str, Path]
    changes: Changes | None = None  # for an evaluator with `changes_under`; None if there was no such folder
    sandbox: Callable[[], Sandbox]
    another: Callable[[], Sandbox] | None = None
    remaining: Callable[[], float]
    logs: Path  # host folder: files left here become artifacts of the evaluation


@runtime_checkable
class Evaluator(Protocol):
    """Built once per evaluation with `cls(**config)`-like strict config. `needs_sandbox` False: judged without one."""

    name: str
    needs_sandbox: bool
    # Sandbox paths (files or folders) that must be collected from the agent's sandbox, besides the task's artifacts.
    collects: tuple[str, ...]
    # A further, optional attribute `changes_under: str | None` names a folder whose changes are wanted as an archive.

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Evaluator:
        """Raises InvalidTask naming the field."""
        ...

    def evaluate(self, outcome: Outcome) -> Evaluation:
        """Judge. Raises EvaluatorError when it could not; that is retried on a fresh sandbox, and never a reward."""
        ...
