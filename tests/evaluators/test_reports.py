"""Report parsers: golden reports, and whatever a hostile program may write instead."""

from __future__ import annotations

import math
import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators.reports import junit, pytest_log, regex, reward_file, tap
from evaluators.reports.findings import MAX_BYTES, MAX_ID, ReportError, Status, collect

PYTEST = b"""\
============================= test session starts ==============================
tests/test_a.py::test_1 PASSED
----------------------------- Captured stdout call -----------------------------
=========================== short test summary info ============================
PASSED tests/test_a.py::test_fail
PASSED tests/test_a.py::test_never_ran
=========================== short test summary info ============================
\x1b[32mPASSED\x1b[0m tests/test_a.py::\x1b[1mtest_1\x1b[0m
PASSED tests/test_a.py::test_p[a - b]
PASSED tests/test_a.py::test_p[a] - b]
SKIPPED [1] tests/test_a.py:3: not now
XFAIL tests/test_a.py::test_x - known
XPASS tests/test_a.py::test_y - better
FAILED tests/test_a.py::test_fail - assert [1, 2] == [
FAILED tests/test_a.py::test_q[x - y] - ValueError: a - b
ERROR tests/test_b.py - ModuleNotFoundError
==================== 2 failed, 2 passed, 1 error in 0.03s ======================
PASSED tests/test_a.py::after_the_end
"""


def test_pytest():
    assert pytest_log.parse(PYTEST).tests == {
        "tests/test_a.py::test_1": "passed",
        "tests/test_a.py::test_p[a - b]": "passed",
        "tests/test_a.py::test_p[a] - b]": "passed",
        "tests/test_a.py::test_x": "xfailed",
        "tests/test_a.py::test_y": "passed",
        "tests/test_a.py::test_fail": "failed",
        "tests/test_a.py::test_q[x - y]": "failed",
        "tests/test_b.py": "error",
    }


def test_an_earlier_summary_only_makes_things_worse():
    fake = b"=== short test summary info ===\nFAILED a::t\n=== short test summary info ===\nPASSED a::t\n"
    assert pytest_log.parse(fake).tests == {"a::t": "failed"}


def test_pytest_without_a_summary():
    with pytest.raises(ReportError, match="-rA"):
        pytest_log.parse(b"PASSED tests/test_a.py::test_1\n")


JUNIT = b"""<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="s" tests="4">
<testcase classname="tests.test_a" name="one"/>
<testcase classname="tests.test_a" name="two"><failure message="m">text</failure><system-out>x</system-out></testcase>
<testcase classname="tests.test_a" name="three"><skipped/></testcase>
<testcase classname="tests.test_a" name="three[a&amp;b]"><error/></testcase>
<testcase name="bare"><system-out><failure/></system-out></testcase>
<testcase classname="tests.test_a" name="one"><error/></testcase>
</testsuite></testsuites>"""


def test_junit():
    assert junit.parse(JUNIT).tests == {
        "tests.test_a::one": "error",  # twice: the worst counts
        "tests.test_a::two": "failed",
        "tests.test_a::three": "skipped",
        "tests.test_a::three[a&b]": "error",
        "bare": "passed",
    }


BOMB = b"""<?xml version="1.0"?><!DOCTYPE l [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>
<testsuite><testcase name="&b;"/></testsuite>"""
EXTERNAL = b"""<!DOCTYPE l [<!ENTITY a SYSTEM "file:///etc/passwd">]><testsuite><testcase name="x">&a;</testcase></testsuite>"""


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not well-formed"),
        (b"<testsuite><testcase name='x'/>", "not well-formed"),
        (b"<html/>", "testsuite"),
        (BOMB, "entities"),
        (EXTERNAL, "entities"),
        (b"<testsuite>" + b"<a>" * 100 + b"</a>" * 100 + b"</testsuite>", "deeper"),
        (b" " * (MAX_BYTES + 1), "bytes"),
        (b"<testsuite><testcase name='" + b"x" * 5000 + b"'/></testsuite>", "characters"),
    ],
)
def test_bad_junit(data: bytes, why: str):
    with pytest.raises(ReportError, match=why):
        junit.parse(data)


def test_too_many_tests():
    with pytest.raises(ReportError, match="more than"):
        collect((str(n), "passed") for n in range(200_001))


def test_tap():
    data = b"""TAP version 13
1..6
ok 1 - adds
not ok 2 - subtracts
  ---
  message: x
  ...
ok 3 - later # SKIP no network
not ok 4 - someday # TODO
ok 5
ok 6 - has \\# in it # time=3ms
"""
    assert tap.parse(data).tests == {
        "adds": "passed",
        "subtracts": "failed",
        "later": "skipped",
        "someday": "xfailed",
        "5": "passed",
        "has \\# in it": "passed",
    }


@pytest.mark.parametrize("indent", [0, 4], ids=["comment at the parent", "comment at the children"])
def test_tap_subtests(indent: int):
    pad = " " * indent
    data = f"{pad}# Subtest: outer\n{pad}    # Subtest: inner\n" if indent == 0 else ""
    if indent:
        data = "    # Subtest: outer\n        # Subtest: inner\n"
    data += "        ok 1 - leaf\n        1..1\n    not ok 1 - inner\n    1..1\nnot ok 1 - outer\n1..1\n"
    assert tap.parse(data.encode()).tests == {
        "outer > inner > leaf": "passed",
        "outer > inner": "failed",
        "outer": "failed",
    }


def test_tap_that_stops_early_is_an_error_of_its_own():
    assert tap.parse(b"1..3\nok 1 - a\n").tests == {"a": "passed", "1..N": "error"}
    assert tap.parse(b"1..3\nok 1 - a\nBail out! no db\nok 2 - b\n").tests == {"a": "passed", "Bail out!": "error"}
    with pytest.raises(ReportError):
        tap.parse(b"hello\n")


def test_regex():
    pattern = regex.compile_pattern(r"^(?P<id>\S+) \.\.\. (?P<status>\w+)$")
    assert regex.parse(b"a ... ok\nnoise\nb ... FAILED\na ... error\n", pattern).tests == {"a": "error", "b": "failed"}
    with pytest.raises(ReportError, match="status word"):
        regex.parse(b"a ... maybe\n", pattern)
    with pytest.raises(ReportError, match="no line"):
        regex.parse(b"", pattern)
    score = regex.compile_pattern(r"score=(?P<reward>\S+)")
    assert regex.parse(b"score=0.1\nscore=0.75\n", score).reward == 0.75
    for bad in (b"score=nan", b"score=inf", b"score=x"):
        with pytest.raises(ReportError):
            regex.parse(bad, score)


@pytest.mark.parametrize("pattern", ["(", "(?P<id>x)", "x", "(?P<id>x)(?P<status>y)(?P<reward>z)"])
def test_bad_patterns(pattern: str):
    with pytest.raises(ValueError, match=r"named groups|regular expression"):
        regex.compile_pattern(pattern)


@pytest.mark.parametrize(
    ("data", "reward"), [(b"1", 1.0), (b" 0.25\n", 0.25), (b'{"reward": -1, "x": []}', -1.0), (b"1e0", 1.0)]
)
def test_reward_file(data: bytes, reward: float):
    assert reward_file.parse(data).reward == reward


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"x", b"true", b"[1]", b"{}", b'{"reward": "1"}', b"NaN", b"Infinity", b"1e999", b"\xff\xfe1"),
        *(b"[" * 100_000, b"9" * 400, b"9" * 5000, b" " * 2_000_000),
    ],
)
def test_bad_reward_files(data: bytes):
    with pytest.raises(ReportError):
        reward_file.parse(data)


ANY = st.binary(max_size=200) | st.text(
    alphabet="=short test summary info PASSED[]-:#ok not 1..2\n<>&/a", max_size=200
).map(str.encode)


@pytest.mark.parametrize(
    "parse",
    [
        pytest_log.parse,
        junit.parse,
        tap.parse,
        reward_file.parse,
        lambda d: regex.parse(d, re.compile("(?P<reward>.)")),
    ],
)
@given(data=ANY)
def test_anything_else_is_a_report_error(parse, data: bytes):
    """Or a report after all, that says no more than one can."""
    try:
        found = parse(data)
    except ReportError as e:
        assert str(e)
        return
    assert set(found.tests.values()) <= set(get_args(Status)) and all(len(x) <= MAX_ID for x in found.tests)
    assert found.reward is None or (math.isfinite(found.reward) and not found.tests)
