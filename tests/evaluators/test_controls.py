"""Control runs: spoiled tests do fail, nothing else does, and liars of several kinds are found."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluators import controls
from evaluators.controls import ControlRules, Tampered, Unconfirmed, key_of
from evaluators.spoiling import ANYWHERE, Target, break_file, functions, spoil

SOURCE = b'''\
"""Ends of tests of all sorts. \xc3\xa4"""
import pytest, unittest

def test_plain(): assert 1 + 1 == 2
def test_text():
    x = """a
  b"""
    assert (x ==
        "a\\n  b"), "m, n"
def test_raises():
    with pytest.raises(ValueError):
        int("\xc3\xa4")
def test_returns():
    if SOURCE_IS_RUN:
        return
    assert 0
def test_inner():
    """doc"""
    def y(): return 1
    assert(y())  # c
def test_long():
    a = 1; assert a == 1; assert a in (1,)
@pytest.mark.parametrize("a", [1, 2])
def test_param(a):
\tassert a
class TestX:
    class TestY:
        def test_deep(self):
            assert [1] == [1]
class Case(unittest.TestCase):
    def test_equal(self):
        self.assertEqual(1 + 1, 2, "m")
    def test_loop(self):
        for i in range(3): self.assertTrue(i < 3)
    def test_none(self):
        self.assertIsNone(None)
    @unittest.skipIf(False, "")
    def test_line(self): self.assertIn(1, [1]); self.assertTrue(1)
SOURCE_IS_RUN = True
'''


def outcomes(source: bytes) -> dict[str, bool]:
    """Does each test pass? Run here, without a runner."""
    space: dict = {}
    exec(compile(source, "tests.py", "exec"), space)
    calls = {n: (lambda f=f: f(1) if n_arguments(f) else f()) for n, f in space.items() if n.startswith("test_")}
    deep = space["TestX"].TestY()
    calls["test_deep"] = deep.test_deep
    case = space["Case"]()
    calls |= {n: getattr(case, n) for n in dir(case) if n.startswith("test_")}
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = True
        except AssertionError:
            found[name] = False
    return found


def n_arguments(f) -> int:
    return f.__code__.co_argcount


ALL = sorted(functions(SOURCE))


def test_all_tests_are_known_and_pass():
    assert len(ALL) == 12 and all(outcomes(SOURCE).values())


@given(st.sets(st.sampled_from(ALL), min_size=1), st.integers(0, 2**32), st.booleans())
def test_spoiled_tests_fail_and_the_others_do_not(targets, seed, certain):
    out, found = spoil(SOURCE, targets, random.Random(seed), certain=certain)
    assert found == targets
    assert {n for n, good in outcomes(out).items() if not good} == {t.name for t in targets}


@given(st.integers(0, 2**32))
def test_windows_lines_and_a_byte_order_mark(seed):
    source = b"\xef\xbb\xbf" + SOURCE.replace(b"\n", b"\r\n").replace(b'"a\\n  b"', b"x")
    out, found = spoil(source, set(ALL), random.Random(seed), certain=False)
    assert found == set(ALL)
    ast.parse(out)


def test_what_may_fail_is_left_alone():
    source = b"""
import pytest
@pytest.mark.xfail
def test_a(): assert 0
def test_b(): assert 1
class A:
    pytestmark = pytest.mark.xfail
    def test_c(self): assert 1
"""
    _, found = spoil(source, functions(source), random.Random(0), certain=False)
    assert found == {Target((), "test_b")}


def test_a_function_by_name_only():
    _, found = spoil(SOURCE, {Target(ANYWHERE, "test_equal")}, random.Random(0), certain=False)
    assert found == {Target(("Case",), "test_equal")}


def test_no_python_is_left_as_it_is():
    for source in (b"test('x', () => {})", b"\xff\xfe\x00", b"def (:"):
        assert spoil(source, {Target((), "x")}, random.Random(0), certain=False) == (source, set())


def test_objects_that_equal_everything_fail():
    source = b"def test_a():\n    assert thing() == 'right'\n"

    class Any(str):
        def __eq__(self, other):
            return True

        __hash__ = str.__hash__

    out, _ = spoil(source, functions(source), random.Random(3), certain=False)
    space: dict = {"thing": lambda: Any("x")}
    exec(out, space)
    space["test_a"]()  # passes although another value is asked for: that is what the control run sees
    assert b"'right'" not in out


@pytest.mark.parametrize("path", ["a.js", "a.test.ts", "a.c", "a.rs", "a.sh", "a.py", "a.unknown"])
def test_broken_files(path):
    assert break_file(path, b"good\n") != b"good\n"


@pytest.mark.parametrize(
    ("test", "key"),
    [
        ("tests/a.py::test_x[a::b]", ("tests/a.py", Target((), "test_x"))),
        ("tests/a.py::A::B::test_x", ("tests/a.py", Target(("A", "B"), "test_x"))),
        ("tests.a.A::test_x", ("", Target(ANYWHERE, "test_x"))),
        ("test_x (app.tests.Case)", ("", Target(ANYWHERE, "test_x"))),
        ("test_x", ("", Target(ANYWHERE, "test_x"))),
        ("reading renews", None),
    ],
)
def test_ids(test, key):
    assert key_of(test) == key


# -- liars, by simulation: a runner over five tests, of which the code under test fails the first three

FILE = "".join(f"def test_{n}():\n    assert answer({n}) == {n}\n" for n in range(5)).encode()
IDS = [f"t.py::test_{n}" for n in range(5)]
RIGHT = {3, 4}


def runner(honest: bool, lie=lambda test, run: True):
    """`lie(test, run)`: does the forger call this failing test passed? Everything it can know is in its arguments."""
    runs = 0

    def run(edit, name):
        nonlocal runs
        runs += 1
        space: dict = {"answer": lambda n: n if honest or n in RIGHT else -1}
        exec(edit("t.py", FILE), space)
        found = {}
        for n, test in enumerate(IDS):
            try:
                space[f"test_{n}"]()
                found[test] = "passed"
            except AssertionError:
                found[test] = "passed" if not honest and lie(test, runs) else "failed"
        return found

    run.count = lambda: runs
    return run


def check(run, seed=0, **rules):
    return controls.check(
        ControlRules(**rules), dict.fromkeys(IDS, "passed"), IDS[:3], IDS[3:], run, chance=random.Random(seed)
    )


@pytest.mark.parametrize("trials", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_honest_code_is_believed_after_as_many_runs(seed, trials):
    run = runner(honest=True)
    assert check(run, seed, trials=trials) == {"trials": trials, "tests": 5, "kind": "spoiled"}
    assert run.count() == trials


@pytest.mark.parametrize("trials", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_who_always_lies_is_found(seed, trials):
    with pytest.raises(Tampered, match="passed although"):
        check(runner(honest=False), seed, trials=trials)


@pytest.mark.parametrize("seed", range(20))
def test_who_lies_about_one_test_only_is_found(seed):
    with pytest.raises((Tampered, Unconfirmed)):
        check(runner(honest=False, lie=lambda test, run: test == IDS[0]), seed)


@pytest.mark.parametrize("seed", range(20))
def test_who_lies_once_in_the_first_run_only_is_not_confirmed(seed):
    with pytest.raises((Tampered, Unconfirmed)):
        check(runner(honest=False, lie=lambda test, run: False), seed)


def test_who_tosses_a_coin_rarely_gets_through():
    """For each run: lie about everything, or about nothing."""
    through = 0
    for seed in range(400):
        coin = random.Random(seed)
        faces: dict[int, bool] = {}
        try:
            check(
                runner(False, lambda test, run, faces=faces, coin=coin: faces.setdefault(run, coin.random() < 0.5)),
                seed,
            )
            through += 1
        except (Tampered, Unconfirmed):
            pass
    assert through == 0  # several tests, some spoiled and some not in each trial: neither face is right


def test_who_tosses_for_each_test_rarely_gets_through():
    through = 0
    for seed in range(400):
        coin = random.Random(seed)
        try:
            check(runner(False, lambda test, run, coin=coin: coin.random() < 0.5), seed)
            through += 1
        except (Tampered, Unconfirmed):
            pass
    assert through <= 40


@pytest.mark.parametrize("trials", [1, 2, 3])
def test_a_coin_for_a_single_test_wins_less_than_it_costs(trials):
    through = 0
    for seed in range(2000):
        coin = random.Random(seed)
        if coin.random() < 0.5:  # not even claimed
            continue
        run = runner(False, lambda test, run, coin=coin, faces={}: faces.setdefault(run, coin.random() < 0.5))
        try:
            statuses = dict.fromkeys(IDS, "passed")
            controls.check(ControlRules(trials=trials), statuses, IDS[:1], IDS[3:], run, chance=random.Random(seed + 1))
            through += 1
        except (Tampered, Unconfirmed):
            pass
    assert through / 2000 < 2**-trials


def test_tests_in_another_language_are_broken_as_files():
    asked = []

    def run(lying):
        def run(edit, name):
            asked.append(edit("x.test.js", b"test"))
            return {"reads": "passed"} if lying else None

        return run

    args = (ControlRules(), {"reads": "passed"}, ["reads"], [])
    assert controls.check(*args, run(False)) == {"trials": 1, "files": 1, "kind": "broken"}
    with pytest.raises(Tampered, match="without a test to run"):
        controls.check(*args, run(True))
    assert all(a.startswith(b"throw") for a in asked)
    assert controls.check(*args, lambda edit, name: None) == {"kind": "none"}


def test_one_unsteady_run_is_asked_again():
    calls = []

    def run(edit, name):
        found = runner(honest=True)(edit, name)
        calls.append(name)
        return dict.fromkeys(IDS, "failed") if len(calls) == 1 else found

    assert check(run)["kind"] == "spoiled" and calls[:2] == ["control1", "control1.again"]
