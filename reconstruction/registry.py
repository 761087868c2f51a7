"""Builders by name, and the check that every trajectory passes, whoever built it."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar import plugins
from polar.completion import Completion
from polar.errors import InvalidTask, PolarError
from polar.task import BuilderSpec
from polar.trace import Trajectory

FAILED = "reconstruction_failed"


def check_config(spec: BuilderSpec) -> None:
    """Raise InvalidTask for an unknown builder or config key. Used at submit."""
    _checked(spec)


def build(spec: BuilderSpec, completions: list[Completion]) -> Trajectory:
    """The trajectory of an attempt. Raises PolarError `reconstruction_failed` if the builder fails or breaks a law:
    arrays that don't align, or sampled tokens that are neither in a trace nor left out under a reason."""
    builder = _checked(spec)
    try:
        trajectory = builder(completions, spec.config)
        if not isinstance(trajectory, Trajectory):
            raise ValueError(f"returned {type(trajectory).__name__}, not a Trajectory")
        _check(trajectory, completions)
    except Exception as e:
        raise PolarError(f"builder '{spec.strategy}': {type(e).__name__}: {e}", code=FAILED, stage="postrun") from e
    return trajectory


def _checked(spec: BuilderSpec) -> Any:
    builder = plugins.load(plugins.BUILDERS, spec.strategy, "builder.strategy")
    if not callable(builder):
        raise InvalidTask(f"builder.strategy: '{spec.strategy}' is {type(builder).__name__}, not a callable")
    check = getattr(builder, "check", None)
    if check is not None:
        check(spec.config)
    return builder


def _check(trajectory: Trajectory, completions: list[Completion]) -> None:
    sampled = {c.completion_id: c.sampled_ids for c in completions}
    placed: list[tuple[str, np.ndarray]] = []
    for trace in trajectory.traces:
        trace.check()
        placed += [(s.completion_id, trace.response_ids[s.start : s.end]) for s in trace.segments]
    if trajectory.packed is not None:
        trajectory.packed.check()
        placed += [(c.completion_id, trajectory.packed.ids[c.start : c.end]) for c in trajectory.packed.calls]
    seen = set()
    for completion_id, ids in placed:
        if completion_id in seen:
            raise ValueError(f"{completion_id} is in the traces twice")
        seen.add(completion_id)
        if completion_id not in sampled or not np.array_equal(ids, sampled[completion_id]):
            raise ValueError(f"tokens of {completion_id} are not those that were sampled")
    f = trajectory.fidelity
    total, trained = sum(map(len, sampled.values())), sum(len(ids) for _, ids in placed)
    if (
        f.unaccounted
        or f.sampled_tokens != total
        or f.trace_tokens != trained
        or min(f.left_out.values(), default=0) < 0
    ):
        raise ValueError(f"{total} tokens were sampled and {trained} are in traces, but the fidelity report says {f}")
