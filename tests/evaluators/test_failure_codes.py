"""What goes wrong in an evaluation has its own code, is tried again where that can help, and is never a reward."""

from __future__ import annotations

import pytest

from polar.config import Settings
from polar.task import EvaluatorSpec, Exec, RuntimeSpec
from runtimes.docker import DockerRuntime
from tests.workers.cluster import Cluster, noop, until

PLAIN = {"isolation": "none"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("codes")) as c:
        c.workers()
        yield c


def judged(cluster, name: str, evaluator: EvaluatorSpec):
    (r,) = cluster.wait(cluster.submit(noop(name, evaluator=evaluator)))
    assert r.termination == "finished" and len(r.attempts) == 1  # the agent's work is not repeated
    return r


def local(**kw) -> RuntimeSpec:
    return RuntimeSpec(backend="local", options=PLAIN, **kw)


def test_a_bug_of_the_evaluators_own(cluster, tmp_path):
    config = {"counter": str(tmp_path / "always"), "times": 9}
    r = judged(cluster, "bug", EvaluatorSpec(name="tests.evaluators.judges:Buggy", config=config, max_attempts=2))
    assert (r.verdict, r.reward, r.evaluation.error.code, r.evaluation.attempts) == (
        "evaluator_error",
        None,
        "evaluator_bug",
        2,
    )
    assert "TypeError: a bug" in r.evaluation.error.message
    config = {"counter": str(tmp_path / "once"), "times": 1}
    r = judged(cluster, "mended", EvaluatorSpec(name="tests.evaluators.judges:Buggy", config=config))
    assert (r.verdict, r.reward, r.evaluation.attempts) == ("passed", 1.0, 2)


@pytest.mark.parametrize(
    ("name", "config", "code"),
    [
        ("crash", {"command": "exit 127"}, "tests_crashed"),
        ("hang", {"command": "sleep 600", "timeout_seconds": 0.5}, "evaluation_timeout"),
        ("silent", {"command": "true", "report": {"kind": "junit"}}, "no_report"),
    ],
)
def test_tests_that_come_to_nothing(cluster, name, config, code):
    r = judged(cluster, name, EvaluatorSpec(name="test_on_output", config=config))
    assert (r.verdict, r.reward, r.evaluation.error.code, r.evaluation.attempts) == ("evaluator_error", None, code, 2)


def test_a_sandbox_that_cannot_be_prepared(cluster):
    spec = local(evaluation_prepare=[Exec(command="exit 3")])
    r = judged(cluster, "prepare", EvaluatorSpec(name="test_on_output", config={"command": "true"}, runtime=spec))
    assert (r.verdict, r.reward, r.evaluation.error.code, r.evaluation.attempts) == (
        "evaluator_error",
        None,
        "prepare_failed",
        2,
    )


@pytest.mark.docker
def test_a_missing_image_is_not_looked_for_twice(cluster):
    ok, why = DockerRuntime(Settings()).available()
    if not ok:
        pytest.skip(f"no Docker engine: {why}")
    spec = RuntimeSpec(backend="docker", image="127.0.0.1:1/polar-no-such-image:1")
    r = judged(cluster, "image", EvaluatorSpec(name="test_on_output", config={"command": "true"}, runtime=spec))
    assert (r.verdict, r.reward, r.evaluation.error.code, r.evaluation.attempts) == (
        "evaluator_error",
        None,
        "image_missing",
        1,
    )


def test_further_sandboxes_are_fresh_and_all_go(cluster):
    r = judged(cluster, "several", EvaluatorSpec(name="tests.evaluators.judges:Several"))
    assert (r.verdict, r.evaluation.error) == ("passed", None)
    until(lambda: not list((cluster.folder / "sandboxes").glob("*")), 60)
