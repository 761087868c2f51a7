"""`session_completed`: the agent's run came to its own end. Needs no sandbox."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from evaluators.config import read
from polar.judge import Outcome
from polar.result import Evaluation


class _Config(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    pass


class SessionCompleted:
    """Passed, reward 1: terminated as `finished` after at least one model call. An attempt without a model call, or
    one that the machinery ended, says nothing about the policy: `not_evaluated`, no reward. Else failed, reward 0."""

    name = "session_completed"
    needs_sandbox = False
    collects: tuple[str, ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SessionCompleted:
        read(config, _Config, cls.name)
        return cls()

    def evaluate(self, outcome: Outcome) -> Evaluation:
        calls = outcome.trajectory.fidelity.completions
        report = {"termination": outcome.termination, "completions": calls}
        if not calls or outcome.termination in ("infra_error", "cancelled"):
            return Evaluation(verdict="not_evaluated", evaluator=self.name, report=report)
        done = outcome.termination == "finished"
        return Evaluation(
            verdict="passed" if done else "failed", outcome_reward=float(done), evaluator=self.name, report=report
        )
