"""What a user's program or a model may answer as a judge, strictly."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from polar.errors import EvaluatorError
from polar.result import Evaluation, Verdict

MAX_BYTES = 4 << 20


class Judgement(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`trace_rewards`: one per trace, in their order, null for the outcome's. `metrics` go into the report."""

    reward: float
    trace_rewards: list[float | None] | None = None
    reason: Annotated[str, Meta(max_length=100_000)] = ""
    metrics: dict[str, float] = field(default_factory=dict)


def read(data: bytes, traces: int, low: float, high: float) -> Judgement:
    """Raises EvaluatorError `bad_judgement`, which another try may mend."""
    try:
        found = msgspec.json.decode(data, type=Judgement)
    except msgspec.DecodeError as e:
        raise _bad(f"{e}; found: {data[:200].decode('utf-8', 'replace')!r}") from e
    rewards = [found.reward, *(r for r in found.trace_rewards or [] if r is not None)]
    for r in [*rewards, *found.metrics.values()]:
        if not math.isfinite(r):
            raise _bad(f"{r} is not finite")
    if outside := [r for r in rewards if not low <= r <= high]:
        raise _bad(f"reward {outside[0]} is not between {low} and {high}")
    if found.trace_rewards is not None and len(found.trace_rewards) != traces:
        raise _bad(f"trace_rewards has {len(found.trace_rewards)} entries for {traces} traces")
    return found


def evaluation(found: Judgement, threshold: float, name: str, **report: Any) -> Evaluation:
    verdict: Verdict = "passed" if found.reward >= threshold else "partial" if found.reward > 0 else "failed"
    report |= {k: v for k in ("reason", "metrics") if (v := getattr(found, k))}
    return Evaluation(
        verdict=verdict,
        outcome_reward=found.reward,
        trace_rewards=found.trace_rewards,
        evaluator=name,
        report=report,
    )


def _bad(message: str) -> EvaluatorError:
    return EvaluatorError(f"the judge's answer: {message}", code="bad_judgement")
