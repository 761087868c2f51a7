"""What a trainer gets: traces built from the completions of one attempt."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct, field

from polar.completion import Role, VersionSpan
from polar.packed import PackedTree

SCHEMA: Final = 1


class Segment(Struct, frozen=True, kw_only=True):
    """The sampled tokens of one completion inside a trace: response positions [start, end).

    `exact` says whether the tokens before it are, token for token, the prompt that the model was given. `index`: the
    completion's order of arrival in its attempt.
    """

    completion_id: str
    start: int
    end: int
    exact: bool = True
    finish_reason: str = "stop"
    index: int = -1
    role: Role = "unknown"


class Trace(Struct, kw_only=True, eq=False, omit_defaults=True):
    """One trainer-facing sequence.

    prompt_ids: int32 (P,). response_ids: int32 (R,). loss_mask: uint8 (R,), 1 exactly on sampled tokens.
    logprobs: float32 (R,), natural log under the sampling policy; 0.0 placeholders where loss_mask is 0.
    versions: spans over response positions, sampled tokens only. weight: this trace's share of its session (sums to 1).
    role: what its completions agree on. left_out: reason -> sampled tokens of its chain that it doesn't train on (where
    the next prompt repeats them, they stand in it with mask 0).
    """

    trace_id: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    segments: list[Segment] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    role: Role = "unknown"
    weight: float = 1.0
    reward: float | None = None
    finish_reason: str = "stop"
    truncated: bool = False
    left_out: dict[str, int] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def completion_index(self) -> np.ndarray:
        """int32 (R,): the order of arrival of the completion that sampled each token, -1 where loss_mask is 0."""
        out = np.full(len(self.response_ids), -1, dtype="<i4")
        for s in self.segments:
            out[s.start : s.end] = s.index
        return out

    def exact_mask(self) -> np.ndarray:
        """uint8 (R,): 1 on sampled tokens whose context is, token for token, the one that the model was given."""
        out = np.zeros(len(self.response_ids), dtype="|u1")
        for s in self.segments:
            out[s.start : s.end] = s.exact
        return out

    def policy_versions(self) -> tuple[list[str], np.ndarray]:
        """The versions by first appearance, and int32 (R,): each token's version as an index into them, -1 if unknown."""
        names = list(dict.fromkeys(v.version for v in self.versions))
        out = np.full(len(self.response_ids), -1, dtype="<i4")
        for v in self.versions:
            out[v.start : v.end] = names.index(v.version)
        return names, out

    def check(self) -> None:
        """Raise ValueError unless all arrays align and the mask and segments agree."""
        n = len(self.response_ids)
        if not (len(self.loss_mask) == len(self.logprobs) == n):
            raise ValueError(f"trace {self.trace_id}: arrays differ in length")
        covered = np.zeros(n, dtype=bool)
        for s in self.segments:
            if not 0 <= s.start <= s.end <= n or covered[s.start : s.end].any():
                raise ValueError(f"trace {self.trace_id}: segment {s.start}:{s.end} overlaps or lies outside 0:{n}")
            covered[s.start : s.end] = True
        if not np.array_equal(covered, self.loss_mask.astype(bool)):
            raise ValueError(f"trace {self.trace_id}: loss mask and segments differ")


class Fidelity(Struct, kw_only=True, omit_defaults=True):
    """How faithful the traces are to what was sampled. Conservation: sampled_tokens == trace_tokens + sum(left_out).

    chains: conversations of the attempt, retries among them. traces: sequences for the trainer (a packed tree is one).
    merge_factor: completions in traces per trace. stored_tokens: prompt and response tokens of all traces. exact_tokens,
    inexact_tokens: trained tokens by their context. drift_count: places where a prompt renders the response before it in
    other tokens than were sampled; drift_tokens: in how many. retries: abandoned samples of a prompt. splits: reason ->
    traces that begin in the middle of a chain. left_out: reason -> sampled tokens; untrainable: reason -> completions.
    """

    completions: int = 0
    chains: int = 0
    traces: int = 0
    merge_factor: float = 0.0
    sampled_tokens: int = 0
    trace_tokens: int = 0
    stored_tokens: int = 0
    exact_tokens: int = 0
    inexact_tokens: int = 0
    drift_count: int = 0
    drift_tokens: int = 0
    retries: int = 0
    splits: dict[str, int] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)
    untrainable: dict[str, int] = field(default_factory=dict)

    @property
    def unaccounted(self) -> int:
        return self.sampled_tokens - self.trace_tokens - sum(self.left_out.values())


class Trajectory(Struct, kw_only=True, eq=False, omit_defaults=True):
    """All traces of one attempt, and how they were built. The `tree` builder gives `packed` instead of traces;
    `polar.export.rows` makes traces of it."""

    builder: str
    config: dict[str, Any] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    packed: PackedTree | None = None
    fidelity: Fidelity = field(default_factory=Fidelity)
    schema_version: Literal[1] = SCHEMA
