"""What a trainer gets: traces built from the completions of one attempt."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct, field

from polar.completion import Role, VersionSpan

SCHEMA: Final = 1


class Segment(Struct, frozen=True, kw_only=True):
    """The sampled tokens of one completion inside a trace: response positions [start, end).

    `exact` says whether the tokens before it are, token for token, the prompt that the model was given.
    """

    completion_id: str
    start: int
    end: int
    exact: bool = True
    finish_reason: str = "stop"


class Trace(Struct, kw_only=True, eq=False, omit_defaults=True):
    """One trainer-facing sequence.

    prompt_ids: int32 (P,). response_ids: int32 (R,). loss_mask: uint8 (R,), 1 exactly on sampled tokens.
    logprobs: float32 (R,), natural log under the sampling policy; 0.0 placeholders where loss_mask is 0.
    versions: spans over response positions, sampled tokens only. weight: this trace's share of its session (sums to 1).
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
    metadata: dict[str, Any] = field(default_factory=dict)

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
    """How faithful the traces are to what was sampled. Conservation: sampled_tokens == trace_tokens + sum(left_out)."""

    completions: int = 0
    chains: int = 0
    traces: int = 0
    sampled_tokens: int = 0
    trace_tokens: int = 0
    exact_tokens: int = 0
    inexact_tokens: int = 0
    drift_count: int = 0
    drift_tokens: int = 0
    retries: int = 0
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> sampled tokens

    @property
    def unaccounted(self) -> int:
        return self.sampled_tokens - self.trace_tokens - sum(self.left_out.values())


class Trajectory(Struct, kw_only=True, eq=False, omit_defaults=True):
    """All traces of one attempt."""

    builder: str
    traces: list[Trace] = field(default_factory=list)
    fidelity: Fidelity = field(default_factory=Fidelity)
    schema_version: Literal[1] = SCHEMA
