"""One sequence for a whole attempt: every call keeps its own context, and what calls share is stored once.

Tokens lie in depth-first order, so that what descends from a token lies right behind it: token q may attend to token k
exactly if `k <= q < subtree_ends()[k]`. Token i is predicted from the hidden state of token `parents[i]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct, field

from polar.completion import Role, VersionSpan


class Run(Struct, array_like=True, frozen=True):
    """Tokens [start, end), each the successor of the one before it; the first succeeds token `parent` (-1: none).

    `call`: whose sampled tokens these are, as an index into `calls`; -1 for tokens that were only read.
    """

    start: int
    end: int
    parent: int
    call: int = -1


class PackedCall(Struct, kw_only=True, eq=False, omit_defaults=True):
    """One completion. Its prompt ends with token `context` (-1: an empty prompt), its sampled tokens are [start, end).
    `versions`: spans over the packed tokens. `weight`: this call's share of its session (sums to 1)."""

    trace_id: str
    completion_id: str
    index: int = -1
    context: int
    start: int
    end: int
    versions: list[VersionSpan] = field(default_factory=list)
    role: Role = "unknown"
    weight: float = 1.0
    reward: float | None = None
    finish_reason: str = "stop"
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class PackedTree(Struct, kw_only=True, eq=False):
    """ids int32 (N,). parents int32 (N,): the token before, -1 at the beginning of a prompt. positions int32 (N,): how
    many tokens come before in its own context. loss_mask uint8 (N,): 1 exactly on sampled tokens. logprobs float32
    (N,), 0.0 placeholders where loss_mask is 0. `runs` in order, without gaps: the same structure in short."""

    ids: np.ndarray
    parents: np.ndarray
    positions: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    runs: list[Run] = field(default_factory=list)
    calls: list[PackedCall] = field(default_factory=list)

    def check(self) -> None:
        """Raise ValueError unless arrays, runs and calls agree and the order is depth-first."""
        n = len(self.ids)
        if not (len(self.parents) == len(self.positions) == len(self.loss_mask) == len(self.logprobs) == n):
            raise ValueError("packed tree: arrays differ in length")
        parents, positions = structure(self.runs, n)
        if not (np.array_equal(parents, self.parents) and np.array_equal(positions, self.positions)):
            raise ValueError("packed tree: parents or positions differ from the runs")
        sampled = np.zeros(n, dtype=bool)
        by_start = {r.start: r for r in self.runs}
        for number, c in enumerate(self.calls):
            run = by_start.get(c.start)
            if run is None or (run.end, run.parent, run.call) != (c.end, c.context, number):
                raise ValueError(f"packed tree: call {c.completion_id} is not one run")
            sampled[c.start : c.end] = True
        if not np.array_equal(sampled, self.loss_mask.astype(bool)):
            raise ValueError("packed tree: loss mask and calls differ")

    def path(self, token: int) -> list[slice]:
        """The slices of `ids` from the beginning of the context to `token` inclusive; empty for -1."""
        starts = np.fromiter((r.start for r in self.runs), dtype=np.int64, count=len(self.runs))
        out: list[slice] = []
        while token >= 0:
            run = self.runs[int(np.searchsorted(starts, token, side="right")) - 1]
            out.append(slice(run.start, token + 1))
            token = run.parent
        return out[::-1]

    def prompt(self, call: PackedCall) -> np.ndarray:
        """The original prompt of a call, int32."""
        parts = [self.ids[s] for s in self.path(call.context)]
        return np.concatenate(parts) if parts else np.empty(0, dtype="<i4")

    def subtree_ends(self) -> np.ndarray:
        """int32 (N,): for each token, the end of the stretch that it and its descendants fill."""
        n = len(self.ids)
        ends = np.arange(1, n + 1, dtype=np.int32)
        # Backwards, each run is whole before its parent is looked at; the last branch of a token reaches furthest.
        for run in reversed(self.runs):
            own = ends[run.start : run.end]
            own[:] = np.maximum.accumulate(own[::-1])[::-1]
            if run.parent >= 0:
                ends[run.parent] = max(ends[run.parent], own[0])
        return ends

    def attention_mask(self) -> np.ndarray:
        """bool (N, N), row = the token that looks, column = what it may look at. For small trees: memory is N squared."""
        at = np.arange(len(self.ids))
        return (at[None, :] <= at[:, None]) & (at[:, None] < self.subtree_ends()[None, :])


def structure(runs: list[Run], n: int) -> tuple[np.ndarray, np.ndarray]:
    """(parents, positions), both int32 (n,). Raises ValueError unless the runs cover 0:n in depth-first order."""
    parents = np.arange(-1, n - 1, dtype="<i4")
    positions = np.empty(n, dtype="<i4")
    at = 0
    open_: list[tuple[int, int]] = []  # the path to the token before: (first, last) of each run's part
    for r in runs:
        while open_ and open_[-1][0] > r.parent:
            open_.pop()
        fits = r.start == at and r.start < r.end <= n and (r.parent == -1 or bool(open_ and r.parent <= open_[-1][1]))
        if not fits:
            raise ValueError(f"packed tree: run {r.start}:{r.end} after token {r.parent} doesn't fit")
        first = 0
        if open_:
            open_[-1] = (open_[-1][0], r.parent)
            first = int(positions[r.parent]) + 1
        open_.append((r.start, r.end - 1))
        parents[r.start] = r.parent
        positions[r.start : r.end] = np.arange(first, first + r.end - r.start, dtype="<i4")
        at = r.end
    if at != n:
        raise ValueError(f"packed tree: {n} tokens, but the runs end at {at}")
    return parents, positions
