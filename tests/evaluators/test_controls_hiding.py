"""Control runs of which a part is not reported: by runners that stop at the first failure, and by liars who hide tests."""

from __future__ import annotations

import random

import pytest
from test_controls import IDS, check, runner

from evaluators import controls
from evaluators.controls import ControlRules, Tampered, Unconfirmed


def seen(run, keep):
    """The same runner, of whose report only `keep(number of the run, statuses)` is left."""
    count = 0

    def part(edit, name):
        nonlocal count
        count += 1
        return keep(count, run(edit, name))

    return part


def stop_at_failure(number, statuses):
    out = {}
    for test, status in statuses.items():
        out[test] = status
        if status != "passed":
            break
    return out


@pytest.mark.parametrize("trials", [1, 2, 3])
@pytest.mark.parametrize("seed", range(30))
def test_a_runner_that_stops_at_the_first_failure_confirms_honest_code(seed, trials):
    done = check(seen(runner(honest=True), stop_at_failure), seed, trials=trials)
    assert done["kind"] == "spoiled" and done["tests"] >= 1


@pytest.mark.parametrize("seed", range(30))
def test_who_always_lies_is_found_by_a_runner_that_stops(seed):
    with pytest.raises((Tampered, Unconfirmed)):
        check(seen(runner(honest=False), stop_at_failure), seed)


@pytest.mark.parametrize("others", [[], ["unrelated"], IDS[3:]])
def test_who_tosses_a_coin_and_hides_the_tests_gets_never_through(others):
    """With a chance of a third all tests are forged, otherwise none of the claimed ones is reported."""
    for seed in range(1000):
        coin = random.Random(seed)

        def keep(number, statuses, coin=coin):
            return dict.fromkeys(IDS, "passed") if coin.random() < 1 / 3 else dict.fromkeys(others, "passed")

        with pytest.raises((Tampered, Unconfirmed)):
            check(seen(runner(honest=False), keep), seed)


@pytest.mark.parametrize("trials", [1, 2, 3])
@pytest.mark.parametrize("p", [0.0, 1 / 3, 0.6])
def test_who_guesses_where_a_runner_stops_rarely_gets_through(trials, p):
    """Forge everything, or say that the tests before a random one passed, that one failed, and the rest did not run."""
    through = 0
    for seed in range(1000):
        coin = random.Random(seed)

        def keep(number, statuses, coin=coin):
            if coin.random() < p:
                return dict.fromkeys(IDS, "passed")
            n = coin.randrange(3)
            return dict.fromkeys(IDS[:n], "passed") | {IDS[n]: "failed"}

        try:
            check(seen(runner(honest=False), keep), seed, trials=trials)
            through += 1
        except (Tampered, Unconfirmed):
            pass
    assert through / 1000 * max(p, 1 / 3) < 2**-trials  # it must have been claimed, too


def test_a_test_that_is_inherited_from_a_spoiled_one_may_fail_with_it():
    ids = ["t.py::Base::test_a", "t.py::Sub::test_a", "t.py::Base::test_b", "t.py::Sub::test_b"]
    source = b"class Base:\n    def test_a(self): assert 1 == 1\n    def test_b(self): assert 1 == 1\nclass Sub(Base): pass\n"

    def run(edit, name):
        space: dict = {}
        exec(edit("t.py", source), space)
        found = {}
        for i in ids:
            _, cls, method = i.split("::")
            try:
                getattr(space[cls](), method)()
                found[i] = "passed"
            except AssertionError:
                found[i] = "failed"
        return found

    for seed in range(30):
        for keep in (lambda n, s: s, stop_at_failure):
            out = controls.check(
                ControlRules(), dict.fromkeys(ids, "passed"), ids, [], seen(run, keep), chance=random.Random(seed)
            )
            assert out["kind"] == "spoiled"


@pytest.mark.parametrize(
    ("control", "reward", "reason"),
    [
        (None, 1.0, None), (0.0, 1.0, None), (-1.0, 0.5, None), (0.2, 0.7, None),
        (1.0, 1.0, "tampered"), (2.0, 1.0, "tampered"), (0.2, 0.2, "unconfirmed"), (1.0, 0.5, "unconfirmed"),
    ],
)  # fmt: skip
def test_a_reward_that_does_not_fall(control, reward, reason):
    assert controls.not_lower(control, reward) == reason


SAME = b"""
class A:
    def test_render(self): assert 1 == 1
class B:
    def test_render(self): assert 2 == 2
def test_other(): assert 2 == 2
"""


@pytest.mark.parametrize("seed", range(20))
def test_names_that_lead_to_no_source_may_fail_beside_spoiled_ones(seed):
    """A docstring in the place of a name, as unittest prints it, and a file's own line."""

    def run(edit, name):
        scope: dict = {}
        exec(compile(edit("tests/m.py", SAME), "m", "exec"), scope)

        def status(test) -> str:
            try:
                test()
            except AssertionError:
                return "failed"
            return "passed"

        out = {
            "test_render (m.A)": status(scope["A"]().test_render),
            "Renders the docs.": status(scope["B"]().test_render),
            "test_other (m)": status(scope["test_other"]),
        }
        return out | {"tests/m.py": "passed" if set(out.values()) == {"passed"} else "failed"}

    believed = run(lambda path, source: source, "first")
    done = controls.check(ControlRules(), believed, list(believed), [], run, chance=random.Random(seed))
    assert done["kind"] == "spoiled"
