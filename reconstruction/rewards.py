"""Put the rewards of an evaluation on the traces they belong to."""

from __future__ import annotations

import math

from polar.errors import EvaluatorError
from polar.result import Evaluation
from polar.trace import Trajectory

# Verdicts that judge nothing: their reward is none, whatever else the evaluation says.
UNJUDGED = ("evaluator_error", "not_evaluated")


def apply(trajectory: Trajectory, evaluation: Evaluation) -> None:
    """Set each trace's reward: its own where the evaluator gave one, else the outcome's; none stays none.

    Raises EvaluatorError (not retryable) when there isn't one entry per trace, or a reward is not a finite number.
    """
    outcome, per_trace = evaluation.outcome_reward, evaluation.trace_rewards
    if evaluation.verdict in UNJUDGED:
        outcome, per_trace = None, None
    rewards = [outcome] * len(trajectory.traces)
    if per_trace is not None:
        if len(per_trace) != len(rewards):
            raise _bad(evaluation, f"{len(per_trace)} trace rewards for {len(rewards)} traces")
        rewards = [outcome if own is None else own for own in per_trace]
    for reward in [outcome, *rewards]:
        if reward is not None and not math.isfinite(reward):
            raise _bad(evaluation, f"reward {reward} is not a finite number")
    for trace, reward in zip(trajectory.traces, rewards, strict=True):
        trace.reward = reward


def _bad(evaluation: Evaluation, text: str) -> EvaluatorError:
    return EvaluatorError(f"evaluator '{evaluation.evaluator}': {text}", stage="postrun", retryable=False)
