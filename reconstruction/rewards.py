"""Put the rewards of an evaluation on the traces they belong to."""

from __future__ import annotations

import math

from polar.errors import EvaluatorError
from polar.packed import PackedCall
from polar.result import Evaluation
from polar.trace import Trace, Trajectory

# Verdicts that judge nothing: their reward is none, whatever else the evaluation says.
UNJUDGED = ("evaluator_error", "not_evaluated")


def apply(trajectory: Trajectory, evaluation: Evaluation) -> None:
    """Set the reward of each trace (or packed call): its own where the evaluator gave one, else the outcome's; none stays none.

    Raises EvaluatorError (not retryable) when there isn't one entry per trace, or a reward is not a finite number.
    """
    outcome, per_trace = evaluation.outcome_reward, evaluation.trace_rewards
    if evaluation.verdict in UNJUDGED:
        outcome, per_trace = None, None
    rewarded = units(trajectory)
    rewards = [outcome] * len(rewarded)
    if per_trace is not None:
        if len(per_trace) != len(rewards):
            raise _bad(evaluation, f"{len(per_trace)} trace rewards for {len(rewards)} traces")
        rewards = [outcome if own is None else own for own in per_trace]
    for reward in [outcome, *rewards]:
        if reward is not None and not math.isfinite(reward):
            raise _bad(evaluation, f"reward {reward} is not a finite number")
    for unit, reward in zip(rewarded, rewards, strict=True):
        unit.reward = reward


def units(trajectory: Trajectory) -> list[Trace | PackedCall]:
    """What a reward is given to: the traces, or the calls of a packed tree."""
    return [*trajectory.traces, *(trajectory.packed.calls if trajectory.packed else [])]


def trained_tokens(unit: Trace | PackedCall) -> int:
    return unit.end - unit.start if isinstance(unit, PackedCall) else int(unit.loss_mask.sum())


def _bad(evaluation: Evaluation, text: str) -> EvaluatorError:
    return EvaluatorError(f"evaluator '{evaluation.evaluator}': {text}", stage="postrun", retryable=False)
