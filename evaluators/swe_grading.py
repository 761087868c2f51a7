"""Statuses of an instance's tests to a verdict, by the rules of SWE-bench."""

from __future__ import annotations

from typing import Any

from evaluators.reports import Status
from evaluators.swe_config import Config
from polar.result import Evaluation, Verdict

_LISTED = 100
_PASSING = ("passed", "xfailed")


def status_of(test: str, tests: dict[str, Status]) -> Status | None:
    """By exact id. Data sets have ids that were cut within a parameter: such a one stands for all that begin with it, if
    they agree."""
    if test in tests:
        return tests[test]
    if test.count("[") > test.count("]"):
        found = [s for t, s in tests.items() if t.startswith(test)]
        if found and len({s in _PASSING for s in found}) == 1:
            return found[0]
    return None


def grade(config: Config, tests: dict[str, Status], exit_code: int) -> Evaluation:
    """fail_to_pass: passed (or failed as expected). pass_to_pass: the same, or skipped. A test that is not named has failed,
    unless the report names failing ones only."""
    only_failures = getattr(config.report, "eval_type", "") == "fail_only"

    def fixed(test: str) -> bool:
        return tests.get(test) != "failed" if only_failures else status_of(test, tests) in _PASSING

    def kept(test: str) -> bool:
        return tests.get(test) != "failed" if only_failures else status_of(test, tests) in (*_PASSING, "skipped")

    f2p = [t for t in config.fail_to_pass if not fixed(t)]
    p2p = [t for t in config.pass_to_pass if not kept(t)]
    report: dict[str, Any] = {"exit_code": exit_code, "resolved": not f2p and not p2p}
    for name, wanted, failing in (
        ("fail_to_pass", config.fail_to_pass, f2p),
        ("pass_to_pass", config.pass_to_pass, p2p),
    ):
        report[name] = {"total": len(wanted), "passed": len(wanted) - len(failing)}
        if failing:
            report[name]["failing"] = [f"{t}: {status_of(t, tests) or 'missing'}" for t in failing[:_LISTED]]
    # A runner that failed without a failing test did not tell what happened.
    if exit_code and tests and not any(s in ("failed", "error") for s in tests.values()):
        return evaluation(0.0, report | {"resolved": False, "reason": f"exit code {exit_code} without a failing test"})
    if not f2p and not p2p:
        return evaluation(1.0, report)
    part = 0.0
    if config.partial == "fail_to_pass" and not p2p:
        part = 1 - len(f2p) / len(config.fail_to_pass)
    elif config.partial == "all":
        total = len(config.fail_to_pass) + len(config.pass_to_pass)
        # Leaving everything as it was earns nothing.
        part = 0.0 if len(f2p) == len(config.fail_to_pass) else 1 - (len(f2p) + len(p2p)) / total
    return evaluation(part, report)


def evaluation(reward: float, report: dict[str, Any]) -> Evaluation:
    verdict: Verdict = "passed" if reward >= 1 else "partial" if reward > 0 else "failed"
    return Evaluation(verdict=verdict, outcome_reward=reward, report=report, evaluator="swe")
