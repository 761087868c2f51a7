"""Verdicts beside `swebench`'s own report, over recorded logs."""

from __future__ import annotations

import pytest
from log_cases import CASES, LogCase

from evaluators import running
from evaluators.swe_config import load
from evaluators.swe_grading import grade
from polar.errors import InvalidTask

START, END, CODE = ">>>>> Start Test Output", ">>>>> End Test Output", ">>>>> Test Exit Code"


@pytest.fixture(scope="module")
def grading():
    return pytest.importorskip("swebench.harness.grading", reason="the extra 'swe' is not installed")


def config(case: LogCase):
    return load(
        {
            "test_command": "x", "fail_to_pass": case.fail_to_pass, "pass_to_pass": case.pass_to_pass,
            "report": {"kind": "swebench", "parser": case.parser, "eval_type": case.eval_type, "version": case.version},
        },
        "swe",
    )  # fmt: skip


def ours(case: LogCase) -> tuple[bool, dict]:
    c = config(case)
    try:
        findings = c.report.parse(case.log.encode())
    except running.ReportError:
        return False, {}
    e = grade(c, findings.tests, case.exit_code)
    return e.verdict == "passed", e.report


def theirs(case: LogCase, grading, tmp_path) -> dict:
    from swebench.types import TestSpec

    wanted = (case.fail_to_pass, case.pass_to_pass)
    spec = TestSpec(case.name, "image", [], case.repo, case.version, *wanted, case.parser, case.eval_type)
    path = tmp_path / "log"
    path.write_text(f"+ setup\n{START}\n{case.log}\n{END}\n{CODE}: {case.exit_code}\n")
    prediction = {"instance_id": case.name, "model_patch": "x", "model_name_or_path": "m"}
    return grading.get_eval_report(spec, prediction, str(path), include_tests_status=True)[case.name]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_verdict_is_swebenchs(case, grading, tmp_path):
    resolved, report = ours(case)
    expected = theirs(case, grading, tmp_path)
    assert resolved == expected["resolved"]
    status = expected.get("tests_status")
    if status and report and "reason" not in report:
        for ours_key, key in (("fail_to_pass", "FAIL_TO_PASS"), ("pass_to_pass", "PASS_TO_PASS")):
            assert report[ours_key]["passed"] == len(status[key]["success"]), key


def test_the_cases_are_many_and_both_ways(grading, tmp_path):
    verdicts = [theirs(c, grading, tmp_path)["resolved"] for c in CASES]
    assert len(CASES) >= 20 and len({c.repo for c in CASES}) >= 10 and 8 <= sum(verdicts) <= len(CASES) - 8


def test_an_unknown_parser_is_refused(grading):
    with pytest.raises(InvalidTask, match=r"parse_log_nothing.*allowed: .*parse_log_django"):
        config(CASES[0]._replace(parser="parse_log_nothing"))


def test_markers_bound_what_is_read(grading):
    case = CASES[0]
    report = config(case).report
    inside = f"PASSED before\n{START}\n{case.log}\n{END}\nPASSED after\n"
    assert report.parse(inside.encode()).tests == report.parse(case.log.encode()).tests


def test_output_that_ends_early_is_no_report(grading):

    with pytest.raises(running.ReportError):
        config(CASES[0]).report.parse(b"")
