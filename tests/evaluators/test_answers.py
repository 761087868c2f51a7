"""What an evaluator may return, and what becomes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from evaluators.judgement import checked
from polar.errors import EvaluatorError
from polar.result import ErrorInfo, Evaluation


def said(**fields: Any) -> Evaluation:
    return Evaluation(**({"verdict": "passed"} | fields))


@pytest.mark.parametrize("one", [1, True, np.float64(1), np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)])
def test_numbers_of_any_kind_are_numbers(one):
    found = checked(said(outcome_reward=one, trace_rewards=(one, None)))
    assert found == said(outcome_reward=1.0, trace_rewards=[1.0, None])
    assert {type(r) for r in [found.outcome_reward, found.trace_rewards[0]]} == {float}
    assert checked(said(trace_rewards=np.array([0.5, 1]))).trace_rewards == [0.5, 1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "found NoneType, allowed: an Evaluation"),
        (SimpleNamespace(verdict="passed"), "found SimpleNamespace"),
        (said(verdict="pass"), "verdict: found 'pass', allowed: .*'passed'"),
        (said(outcome_reward="1.0"), "outcome_reward: found '1.0', allowed: number or null"),
        (said(outcome_reward=float("nan")), "nan is not a finite number"),
        (said(outcome_reward=10**400), "outcome_reward: found .*1329 bits"),
        (said(trace_rewards=[1.0, np.inf]), "inf is not a finite number"),
        (said(trace_rewards=0.5), "trace_rewards: found 0.5"),
        (said(trace_rewards=["a"]), "trace_rewards"),
        (said(report=None), "report: found null"),
        (said(report={"x": object()}), "can't be stored: TypeError: object"),
        (said(error="no"), "error: found 'no'"),
    ],
)
def test_an_answer_out_of_form_is_a_bug_that_names_the_field(answer, message):
    with pytest.raises(EvaluatorError, match=message) as e:
        checked(answer)
    assert e.value.code == "evaluator_bug" and e.value.retryable


def test_a_report_is_brought_into_form():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    report = {
        "a\udcff/conftest.py": ["\ud800", ("x", {"y"})], 3: np.int64(4), "big": 1 << 20_000, "array": np.array([1, 2]),
        "struct": ErrorInfo(code="\udc80", message=""), "deep": deep, "plain": [None, True, -1, 2**64 - 1, 0.5, b"b"],
    }  # fmt: skip
    found = checked(said(report=report)).report
    assert found["a\\udcff/conftest.py"] == ["\\ud800", ["x", ["y"]]]
    assert (found["3"], found["big"], found["array"]) == (4, "(an integer of 20001 bits)", [1, 2])
    assert found["struct"]["code"] == "\\udc80" and "nested too deeply" in str(found["deep"])
    assert found["plain"] == report["plain"]


def test_an_answer_is_the_results_own():
    shared = said(outcome_reward=1.0, report={"of": ["all"]})
    found = checked(shared)
    found.report["of"].append("mine")
    assert found is not shared and shared.report == {"of": ["all"]}
