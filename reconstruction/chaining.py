"""Cut the chains of an attempt into traces: where a call can't safely go on in the trace before it, a new one begins."""

from __future__ import annotations

from collections.abc import Callable

from reconstruction.assemble import Plan
from reconstruction.boundary import Join
from reconstruction.labels import metadata
from reconstruction.tree import AttemptTree, Call


def plan_chains(
    tree: AttemptTree, how: Callable[[Call, Call], Join | str], joins: Callable[[Join], bool]
) -> list[Plan]:
    """`how(previous, following)` finds the boundary or says why there is none; `joins` decides whether it is used."""
    plans: list[Plan] = []
    for chain in tree.chains():
        plan: Plan | None = None
        passed: dict[str, int] = {}  # what can't be trained on and has no trace yet
        for call in chain:
            if call.left_out:
                # Only passed by: the next prompt still extends the one before it.
                counts = passed if plan is None else plan.left_out
                counts[call.left_out] = counts.get(call.left_out, 0) + len(call.sampled)
                continue
            found = how(plan.calls[-1], call) if plan else ""
            if plan is not None and isinstance(found, Join) and joins(found):
                plan.calls.append(call)
                plan.joins.append(found)
                continue
            split = found if isinstance(found, str) else "drift"
            plan = Plan([call], split=split, left_out=passed, metadata=metadata(call, split))
            plan.cut = found if isinstance(found, Join) else None
            passed = {}
            plans.append(plan)
    return plans
