"""The numbers of a finished batch, from its result objects."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from msgspec import Struct, field

from polar.codec import decompress, unpack
from polar.objects import ObjectStore
from polar.result import SessionResult
from polar.store.sessions import SessionStore


class Summary(Struct, kw_only=True):
    """Token counts: `sampled` by the proxy's count, `trace` in traces, `left_out` under named reasons (failed attempts
    included). `stages`: mean seconds per stage."""

    sessions: int = 0
    passed: int = 0
    failed: int = 0
    errors: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    trace_tokens: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    exact_tokens: int = 0
    traces: int = 0
    completions: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    terminations: dict[str, int] = field(default_factory=dict)

    @property
    def accounted(self) -> int:
        return self.trace_tokens + sum(self.left_out.values())


def read_results(store: SessionStore, objects: ObjectStore, task_ids: Iterable[str]) -> list[SessionResult]:
    """The results of all finished sessions of these tasks."""
    keys = [s.result for t in task_ids for s in store.task_status(t).sessions if s.result]
    return [unpack(decompress(objects.get(k)), SessionResult) for k in keys]


def summarize(results: list[SessionResult]) -> Summary:
    out = Summary(sessions=len(results))
    seconds: dict[str, list[float]] = defaultdict(list)
    for r in results:
        out.passed += r.verdict == "passed"
        out.failed += r.verdict in ("failed", "partial")
        out.errors += r.termination == "infra_error" or r.verdict == "evaluator_error"
        out.turns += r.usage.turns
        out.sampled_tokens += r.usage.sampled_tokens
        out.terminations[r.termination] = out.terminations.get(r.termination, 0) + 1
        f = r.trajectory.fidelity
        out.trace_tokens += f.trace_tokens
        out.exact_tokens += f.exact_tokens
        out.traces += r.trajectory.fidelity.traces
        out.completions += f.completions
        for reason, n in f.left_out.items():
            out.left_out[reason] = out.left_out.get(reason, 0) + n
        if dead := sum(line.sampled_tokens for line in r.attempts[:-1]):
            out.left_out["failed_attempt"] = out.left_out.get("failed_attempt", 0) + dead
        for stage, value in r.timing.items():
            seconds[stage].append(value)
    out.stages = {stage: sum(v) / len(v) for stage, v in seconds.items()}
    return out
