"""From what a report says to a verdict and a reward."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from evaluators.reports import Findings, Status
from polar.result import Evaluation, Verdict

# How many ids of each sort a result names; the counts are always whole.
_LISTED = 100


class Rules(Struct, kw_only=True, frozen=True):
    """`required`: must pass; empty: all that were reported, and at least one. `forbidden`: must not pass. `optional`:
    don't count. `partial_credit`: the reward is the passed fraction. `check_exit_code`: a non-zero exit without a
    failing test to explain it is a failure."""

    required: list[str] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    optional: list[str] = field(default_factory=list)
    partial_credit: bool = False
    check_exit_code: bool = True


def grade(findings: Findings, rules: Rules, exit_code: int) -> Evaluation:
    if findings.reward is not None:
        return _evaluation(findings.reward, {"exit_code": exit_code})
    tests = findings.tests
    wanted = rules.required or [
        t for t, s in tests.items() if t not in rules.forbidden and t not in rules.optional and s not in _NEUTRAL
    ]
    passed = [t for t in wanted if tests.get(t) == "passed"]
    failing = [t for t in wanted if tests.get(t) != "passed"]
    hit = [t for t in rules.forbidden if tests.get(t) == "passed"]
    unexplained = rules.check_exit_code and exit_code != 0 and not any(s in _BAD for s in tests.values())
    report: dict[str, Any] = {
        "exit_code": exit_code,
        "counts": {status: n for status in _ALL if (n := sum(s == status for s in tests.values()))},
        "wanted": len(wanted),
        "passed": len(passed),
    }
    _list(report, "failing", [f"{t}: {tests.get(t, 'missing')}" for t in failing])
    _list(report, "forbidden_passed", hit)
    if unexplained:
        report["reason"] = f"exit code {exit_code} without a failing test"
    if hit or unexplained or not wanted:
        return _evaluation(0.0, report)
    fraction = len(passed) / len(wanted)
    return _evaluation(fraction if rules.partial_credit else float(not failing), report)


_ALL: tuple[Status, ...] = ("passed", "failed", "error", "skipped", "xfailed")
_BAD = ("failed", "error")
_NEUTRAL = ("skipped", "xfailed")


def by_exit_code(exit_code: int) -> Evaluation:
    return _evaluation(float(exit_code == 0), {"exit_code": exit_code})


def failed(reason: str, reward: float = 0.0) -> Evaluation:
    return _evaluation(reward, {"reason": reason})


def _evaluation(reward: float, report: dict[str, Any]) -> Evaluation:
    verdict: Verdict = "passed" if reward >= 1 else "partial" if reward > 0 else "failed"
    return Evaluation(verdict=verdict, outcome_reward=reward, report=report)


def _list(report: dict[str, Any], key: str, values: list[str]) -> None:
    if values:
        report[key] = values[:_LISTED]
