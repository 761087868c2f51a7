"""New traces for a stored result, from its capture alone: nothing is run again, and what was judged stays judged."""

from __future__ import annotations

import msgspec

from polar.codec import pack
from polar.completion import Completion
from polar.errors import PolarError
from polar.packed import PackedCall
from polar.result import Evaluation, SessionResult
from polar.task import BuilderSpec
from polar.trace import Trace, Trajectory
from reconstruction import registry, rewards
from reconstruction.rewards import units


def rebuild(stored: SessionResult, completions: list[Completion], spec: BuilderSpec) -> SessionResult:
    """The result with the traces of another builder. Verdict and outcome reward are carried over; rewards that an evaluator
    gave to single traces follow the completions they were given for.

    Raises PolarError `corrupt_capture` if the capture isn't that of the result, `reconstruction_failed` if the builder
    fails, breaks a law, or gives another answer when asked again.
    """
    _same_attempt(stored, completions)
    trajectory = registry.build(spec, completions)
    if pack(registry.build(spec, completions[::-1])) != pack(trajectory):
        raise PolarError(
            f"builder '{spec.strategy}' gives different traces for the same capture",
            code=registry.FAILED,
            stage="postrun",
        )
    evaluation = stored.evaluation or Evaluation(verdict="not_evaluated")
    if evaluation.trace_rewards is not None:
        own = _carry_over(stored.trajectory, trajectory)
        evaluation = msgspec.structs.replace(evaluation, trace_rewards=own)
        # A trace whose completions were rewarded differently has no reward of its own, and not the outcome's either.
        rewards.apply(trajectory, msgspec.structs.replace(evaluation, outcome_reward=None))
    else:
        rewards.apply(trajectory, evaluation)
    failed = stored.error is not None and stored.error.code == registry.FAILED
    return msgspec.structs.replace(
        stored,
        trajectory=trajectory,
        evaluation=evaluation if stored.evaluation else None,
        error=None if failed else stored.error,
    )


def _same_attempt(stored: SessionResult, completions: list[Completion]) -> None:
    """A capture that lost completions, or belongs to another attempt, must not pass for this one's."""
    unique = {c.completion_id: c for c in completions}
    strangers = {(c.session_id, c.attempt) for c in completions} - {(stored.session_id, stored.attempt)}
    sampled, f = sum(len(c.sampled_ids) for c in unique.values()), stored.trajectory.fidelity
    if strangers or (len(unique), sampled) != (f.completions, f.sampled_tokens):
        raise PolarError(
            f"the capture holds {len(unique)} completions with {sampled} tokens"
            f"{' of other attempts' if strangers else ''}; the result of {stored.session_id} (attempt {stored.attempt}) "
            f"speaks of {f.completions} with {f.sampled_tokens}",
            code="corrupt_capture",
        )


def _carry_over(old: Trajectory, new: Trajectory) -> list[float | None]:
    of: dict[str, float | None] = {}
    for unit in units(old):
        of.update(dict.fromkeys(completion_ids(unit), unit.reward))
    out: list[float | None] = []
    for unit in units(new):
        given = {of.get(i) for i in completion_ids(unit)}
        out.append(given.pop() if len(given) == 1 else None)
        if given:
            unit.metadata["reward"] = "mixed"
    return out


def completion_ids(unit: Trace | PackedCall) -> list[str]:
    return [unit.completion_id] if isinstance(unit, PackedCall) else [s.completion_id for s in unit.segments]
