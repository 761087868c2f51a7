"""Lay the turns of one trace into arrays: allocated once, every token copied once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polar.completion import Role, VersionSpan
from polar.trace import Fidelity, Segment, Trace
from reconstruction.boundary import Join
from reconstruction.tokens import pieces, tokens_from
from reconstruction.tree import Call

# Finish reasons of a response that the policy didn't end itself.
CUT_SHORT = ("length", "abort", "error")


@dataclass(eq=False)
class Plan:
    """The calls of one trace, with the join before each (none before the first).

    `split`: why the trace doesn't go on with the one before it in its chain; `cut`: the boundary there, if one was found.
    `left_out` and `metadata` go to the trace.
    """

    calls: list[Call]
    joins: list[Join | None] = field(default_factory=lambda: [None])
    split: str = ""
    cut: Join | None = None
    left_out: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, object] = field(default_factory=dict)


def assemble(plan: Plan, trace_id: str, fidelity: Fidelity) -> Trace:
    """The trace of a plan; its tokens and drift are added to `fidelity`."""
    first = plan.calls[0]
    prompt = np.empty(first.prompt.depth, dtype="<i4")
    _fill(prompt, 0, pieces(first.prompt, 0))

    gaps = [sum(map(len, j.interstitial)) if j else 0 for j in plan.joins]
    size = sum(gaps) + sum(len(c.sampled) for c in plan.calls)
    response = np.empty(size, dtype="<i4")
    mask = np.zeros(size, dtype="|u1")
    logprobs = np.zeros(size, dtype="<f4")
    segments: list[Segment] = []
    versions: list[VersionSpan] = []
    context = _Context(response, first.prompt.depth)
    at = 0
    for call, how in zip(plan.calls, plan.joins, strict=True):
        if how is not None:
            at = _fill(response, at, how.interstitial)
        c, end = call.completion, at + len(call.sampled)
        exact = context.equals(call, at)
        response[at:end] = call.sampled
        mask[at:end] = 1
        logprobs[at:end] = c.logprobs
        segments.append(
            Segment(
                completion_id=c.completion_id,
                start=at,
                end=end,
                exact=exact,
                finish_reason=c.finish_reason,
                index=c.index,
                role=c.role,
            )
        )
        add_versions(versions, c.versions, at, end)
        fidelity.trace_tokens += end - at
        if exact:
            fidelity.exact_tokens += end - at
        else:
            fidelity.inexact_tokens += end - at
        at = end
    last = plan.calls[-1].completion.finish_reason
    fidelity.traces += 1
    fidelity.stored_tokens += len(prompt) + size
    _count_boundaries(plan, fidelity)
    return Trace(
        trace_id=trace_id,
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=mask,
        logprobs=logprobs,
        segments=segments,
        versions=versions,
        role=_role(plan.calls),
        finish_reason=last,
        truncated=last in CUT_SHORT,
        left_out=plan.left_out,
        metadata=plan.metadata,
    )


def _count_boundaries(plan: Plan, fidelity: Fidelity) -> None:
    if plan.split:
        fidelity.splits[plan.split] = fidelity.splits.get(plan.split, 0) + 1
        fidelity.drift_count += 1  # every reason to split is a response that isn't repeated as it was
    for how in [plan.cut, *plan.joins]:
        if how is not None and not how.literal:
            fidelity.drift_count += how is not plan.cut
            fidelity.drift_tokens += how.drift


class _Context:
    """Compares the trace so far with the original prompt of each call. Prompts of a chain extend one another, so only
    what is new in both is looked at, and a difference once found stays."""

    def __init__(self, response: np.ndarray, prompt_length: int):
        self.response = response
        self.offset = prompt_length
        self.agreed = prompt_length
        self.differs = False

    def equals(self, call: Call, at: int) -> bool:
        length, wanted = self.offset + at, call.prompt.depth
        if not self.differs:
            stop = min(length, wanted)
            if stop > self.agreed:
                ours = self.response[self.agreed - self.offset : stop - self.offset]
                theirs = tokens_from(call.prompt, self.agreed)[: stop - self.agreed]
                self.differs = not np.array_equal(ours, theirs)
                self.agreed = stop
        return not self.differs and length == wanted


def _fill(out: np.ndarray, at: int, parts: list[np.ndarray]) -> int:
    for part in parts:
        out[at : at + len(part)] = part
        at += len(part)
    return at


def add_versions(spans: list[VersionSpan], new: list[VersionSpan], at: int, end: int) -> None:
    for v in new:
        start, stop = at + max(0, v.start), min(end, at + v.end)
        if start >= stop:
            continue
        if spans and spans[-1].version == v.version and spans[-1].end == start:
            spans[-1] = VersionSpan(v.version, spans[-1].start, stop)
        else:
            spans.append(VersionSpan(v.version, start, stop))


def _role(calls: list[Call]) -> Role:
    """The role that all calls share; a call that gave no hint goes with the others of its conversation."""
    roles = {c.completion.role for c in calls}
    if len(roles) > 1:
        roles.discard("unknown")
    return roles.pop() if len(roles) == 1 else "unknown"
