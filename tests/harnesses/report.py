"""One line of the report: what a run of a CLI through a scenario came to, measured from what was captured."""

from __future__ import annotations

from collections import Counter
from typing import Any

from harness_adapters.versions import versions
from polar.completion import Completion
from polar.result import SessionResult
from tests.harnesses.clis import Cli
from tests.harnesses.network import Watch
from tests.harnesses.scenarios import Scenario
from tests.harnesses.scripted_engine import ScriptedEngine


def measure(
    cli: Cli,
    scenario: Scenario,
    key: str,
    result: SessionResult,
    captured: list[Completion],
    engine: ScriptedEngine,
    watch: Watch | None,
) -> dict[str, Any]:
    """`turns`: completions; `chains`: those that begin one; `continuity`: the share of the turns, but for the first of each
    expected chain, that continue an earlier one by its own tokens."""
    kinds = engine.kinds
    asked = {s.rid for s in engine.of(key)} | {c.completion_id for c in captured}
    starts = [c for c in captured if c.link not in ("continued", "sibling")]
    # A conversation's first turn has nothing to continue: the main one's, a subagent's, a summary's.
    firsts = [
        c
        for c in starts
        if c.link == "first" or _number(engine, c) == 1 or kinds.get(c.completion_id) in ("compaction", "other")
    ]
    breaks = [c for c in starts if c not in firsts]
    could = len(captured) - len(firsts)
    fidelity = result.trajectory.fidelity
    return {
        "harness": cli.harness,
        "version": versions().harnesses[cli.harness].version,
        "dialect": cli.dialect,
        "scenario": scenario.name,
        "ok": False,
        "termination": result.termination,
        "turns": len(captured),
        "chains": len(starts),
        "continuity": round((could - len(breaks)) / could, 4) if could else 1.0,
        "breaks": dict(Counter(c.link_reason for c in breaks)),
        "foreign_hosts": None if watch is None else sorted(watch.foreign),
        "sampled_tokens": engine.sampled(asked),
        "accounted_tokens": fidelity.trace_tokens + sum(fidelity.left_out.values()),
        "captured_tokens": sum(len(c.sampled_ids) for c in captured),
        "roles": dict(Counter(c.role for c in captured)),
        "seconds": result.timing.get("run", 0.0),
        "notes": result.agent.get("notes", {}),
        "message": result.agent.get("message", ""),
    }


def _number(engine: ScriptedEngine, c: Completion) -> int:
    return next((s.decision.number for s in engine.log if s.rid == c.completion_id), 0)
