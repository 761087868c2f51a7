"""`tree`: one packed sequence per attempt. Every call keeps its original prompt; what prompts share is stored once.

A prompt's tokens are found in the token tree or appended as a run; a call's sampled tokens are always a run of their own
(they are trained on once per call, even where two calls sampled the same). Runs are then laid out depth-first.
"""

from __future__ import annotations

import numpy as np

from polar.packed import PackedCall, PackedTree, Run, structure
from polar.trace import Fidelity
from reconstruction.assemble import CUT_SHORT, Plan, add_versions
from reconstruction.builder import Builder, BuilderConfig
from reconstruction.per_request import plan_calls
from reconstruction.tokens import Node


class _Run:
    __slots__ = ("call", "children", "length", "parent", "parts", "start")

    def __init__(self, parent: _Spot | None, call: int = -1):
        self.parent = parent
        self.call = call
        self.parts: list[np.ndarray] = []
        self.length = 0
        self.start = -1
        self.children: list[tuple[int, _Run]] = []
        if parent is not None:
            parent[0].children.append((parent[1], self))

    def add(self, tokens: np.ndarray) -> None:
        self.parts.append(tokens)
        self.length += len(tokens)


_Spot = tuple[_Run, int]  # a token: its run, and its place in it


def pack(plans: list[Plan], label: str, fidelity: Fidelity) -> PackedTree:
    """The packed tree of single-call plans, in their order."""
    where: dict[Node, _Spot] = {}
    roots: list[_Run] = []
    samples = [_place(plan, number, where, roots) for number, plan in enumerate(plans)]
    ordered = _depth_first(roots)
    n = sum(r.length for r in ordered)
    runs = [Run(r.start, r.start + r.length, _at(r.parent), r.call) for r in ordered]
    parents, positions = structure(runs, n)
    tree = PackedTree(
        ids=np.empty(n, dtype="<i4"),
        parents=parents,
        positions=positions,
        loss_mask=np.zeros(n, dtype="|u1"),
        logprobs=np.zeros(n, dtype="<f4"),
        runs=runs,
    )
    for r in ordered:
        np.concatenate(r.parts, out=tree.ids[r.start : r.start + r.length])
    for number, (plan, run) in enumerate(zip(plans, samples, strict=True)):
        c, start, end = plan.calls[0].completion, run.start, run.start + run.length
        tree.loss_mask[start:end] = 1
        tree.logprobs[start:end] = c.logprobs
        call = PackedCall(
            trace_id=f"{label}.t{number}",
            completion_id=c.completion_id,
            index=c.index,
            context=_at(run.parent),
            start=start,
            end=end,
            role=c.role,
            finish_reason=c.finish_reason,
            truncated=c.finish_reason in CUT_SHORT,
            metadata=plan.metadata,
        )
        add_versions(call.versions, c.versions, start, end)
        tree.calls.append(call)
        fidelity.trace_tokens += run.length
        fidelity.exact_tokens += run.length
    fidelity.traces = 1 if plans else 0
    fidelity.stored_tokens = n
    return tree


def _place(plan: Plan, number: int, where: dict[Node, _Spot], roots: list[_Run]) -> _Run:
    """Put prompt and sample of a call where they belong; returns the run of the sample."""
    call = plan.calls[0]
    new: list[Node] = []
    node = call.prompt
    while node.parent is not None and node not in where:
        new.append(node)
        node = node.parent
    if new:
        run = _run(where.get(node), roots)
        for node in reversed(new):
            run.add(node.edge)
            where[node] = (run, run.length - 1)
    run = _run(where.get(call.prompt), roots, number)
    run.add(call.sampled)
    node = call.full
    while node is not call.prompt:
        where.setdefault(node, (run, node.depth - call.prompt.depth - 1))
        assert node.parent is not None
        node = node.parent
    return run


def _run(parent: _Spot | None, roots: list[_Run], call: int = -1) -> _Run:
    run = _Run(parent, call)
    if parent is None:
        roots.append(run)
    return run


def _depth_first(roots: list[_Run]) -> list[_Run]:
    """All runs in order, with `start` set. A run goes on before its branches do, and the branches from its end come
    before those from its beginning: so the descendants of every token are one stretch."""
    out: list[_Run] = []
    at = 0
    stack = roots[::-1]
    while stack:
        run = stack.pop()
        run.start = at
        at += run.length
        out.append(run)
        run.children.sort(key=lambda child: -child[0])  # stable: the same place in order of arrival
        stack += [child for _, child in reversed(run.children)]
    return out


def _at(spot: _Spot | None) -> int:
    return -1 if spot is None else spot[0].start + spot[1]


build = Builder("tree", BuilderConfig, plan_calls, pack)
