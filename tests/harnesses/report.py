"""One line of the report: what a run of a CLI through a scenario came to, measured from what was captured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from harness_adapters.versions import versions
from polar.completion import Completion
from polar.result import SessionResult
from tests.harnesses.cases import Case
from tests.harnesses.clis import Cli
from tests.harnesses.network import Watch
from tests.harnesses.scenarios import Scenario
from tests.harnesses.scripted_engine import ScriptedEngine


@contextmanager
def reported(case: Case, report: Callable[[dict[str, Any]], None]) -> Iterator[dict[str, Any]]:
    """A run's row, to be filled with what was measured: `ok` if the block comes to its end, a failed one however else it
    is left."""
    row: dict[str, Any] = {
        **_named(case.cli, case.scenario), "runtime": case.runtime, "ok": False, "termination": "", "turns": 0, "chains": 0,
        "continuity": 0.0, "breaks": {}, "foreign_hosts": None, "sampled_tokens": 0, "accounted_tokens": 0,
    }  # fmt: skip
    try:
        yield row
        row["ok"] = True
    except BaseException as e:
        row["ok"] = False
        row["failure"] = f"{type(e).__name__}: {e}"[:2000]
        raise
    finally:
        report(row)


def _named(cli: Cli, scenario: Scenario) -> dict[str, Any]:
    return {
        "harness": cli.harness,
        "version": versions().harnesses[cli.harness].version,
        "dialect": cli.dialect,
        "scenario": scenario.name,
    }


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
        **_named(cli, scenario),
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
