"""Group-relative advantages, on sessions and not on traces: a session that fell into many traces is one opinion."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from msgspec import Struct

from polar.result import SessionResult
from reconstruction.rewards import UNJUDGED

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["std", "none"]

# Spread below which a group says nothing about which session was better (relative to the size of its rewards).
DEGENERATE = 1e-6
NOT_JUDGED = "not_judged"
# Ends of a session that say nothing about the policy, whatever reward somebody wrote.
UNFIT = ("infra_error", "cancelled")


class GroupAdvantages(Struct, kw_only=True, frozen=True):
    """`values`: one per session, none for the excluded. `excluded_by`: reason -> sessions. `std` is the population's."""

    values: list[float | None]
    used: int
    excluded: int
    excluded_by: dict[str, int]
    mean: float
    std: float
    degenerate: bool  # no spread: every advantage is 0


def group_advantages(
    rewards: Sequence[float | None], *, baseline: Baseline = "mean", scale: Scale = "std"
) -> GroupAdvantages:
    """Advantages of the sessions of one task.

    baseline `mean`: r_i - mean(r). `leave_one_out`: r_i - mean of the other sessions. scale `std` divides by the
    standard deviation of the whole group (never of the others alone: that is zero in a group with one winner).
    Sessions with reward none are excluded. A group without spread, or with one judged session, gets zeros.
    """
    if baseline not in ("mean", "leave_one_out") or scale not in ("std", "none"):
        raise ValueError(
            f"baseline '{baseline}' or scale '{scale}' is unknown; allowed: mean, leave_one_out; std, none"
        )
    for r in rewards:
        if r is not None and not math.isfinite(r):
            raise ValueError(f"reward {r} is not a finite number; a session that was not judged has none")
    judged = np.array([r for r in rewards if r is not None], dtype=np.float64)
    n = len(judged)
    mean = float(judged.mean()) if n else 0.0
    std = float(judged.std()) if n else 0.0
    degenerate = n < 2 or std <= DEGENERATE * max(1.0, float(np.abs(judged).max()))
    if degenerate:
        advantages = np.zeros(n)
    else:
        advantages = judged - mean
        if baseline == "leave_one_out":
            advantages *= n / (n - 1)  # r_i - (sum - r_i) / (n - 1)
        if scale == "std":
            advantages /= std
    left = iter(advantages.tolist())
    return GroupAdvantages(
        values=[None if r is None else next(left) for r in rewards],
        used=n,
        excluded=len(rewards) - n,
        excluded_by={NOT_JUDGED: len(rewards) - n} if len(rewards) > n else {},
        mean=mean,
        std=std,
        degenerate=degenerate,
    )


def session_advantages(
    results: Sequence[SessionResult], *, baseline: Baseline = "mean", scale: Scale = "std"
) -> GroupAdvantages:
    """The same for the results of one task, in their order: infrastructure failures, cancelled sessions and what was not
    judged are excluded and counted by reason. An advantage holds for every trained token of its session's traces.

    Raises ValueError for results of several tasks.
    """
    if len({r.task_id for r in results}) > 1:
        raise ValueError(f"a group is one task's sessions; found {', '.join(sorted({r.task_id for r in results}))}")
    reasons = [_against(r) for r in results]
    group = group_advantages(
        [None if why else r.reward for r, why in zip(results, reasons, strict=True)], baseline=baseline, scale=scale
    )
    return msgspec.structs.replace(group, excluded_by=dict(sorted(Counter(filter(None, reasons)).items())))


def _against(result: SessionResult) -> str:
    if result.termination in UNFIT:
        return result.termination
    if result.verdict in UNJUDGED:
        return result.verdict
    return NOT_JUDGED if result.reward is None else ""
