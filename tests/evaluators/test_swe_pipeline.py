"""Real repositories through the whole pipeline: an agent by script, INIT, RUN, POSTRUN with the `swe` evaluator."""

from __future__ import annotations

import shutil
import sys

import pytest

from polar.config import Settings
from polar.result import SessionResult
from polar.task import AgentSpec, EvaluatorSpec, RetryPolicy, RuntimeSpec, TaskRequest
from runtimes.docker import DockerRuntime
from tests.evaluators import repos
from tests.evaluators.repos import no_local_python
from tests.workers.cluster import Cluster

NEEDS = {"words": (), "lru": ("node",), "ring": ("gcc", "make")}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("swe"), lease_seconds=5.0, node_timeout_seconds=15.0) as c:
        c.workers()
        yield c


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])])
def place(request) -> tuple[dict, str]:
    """Fields of a runtime spec, and the interpreter that has pytest there."""
    if request.param == "docker":
        ok, why = DockerRuntime(Settings()).available()
        if not ok:
            pytest.skip(f"no Docker engine: {why}")
        return {"backend": "docker", "image": repos.image(), "workdir": repos.REPO}, "python3"
    if why := no_local_python():
        pytest.skip(why)
    return {"backend": "local", "options": {"isolation": "bwrap"}, "workdir": repos.REPO}, sys.executable


def task(place, repo, name: str, command: str, **config) -> TaskRequest:
    fields, python = place
    return TaskRequest(
        task_id=f"{fields['backend']}-{repo.name}-{name}",
        instruction="fix it",
        agent=AgentSpec(harness="shell", command=command),
        runtime=RuntimeSpec(**fields, prepare=repo.prepare()),
        evaluator=EvaluatorSpec(name="swe", config=repo.config(python, **config)),
        retry=RetryPolicy(max_attempts=1),
    )


def agree(r: SessionResult) -> dict:
    assert r.evaluation is not None, r.error
    return {"verdict": r.verdict, "reward": r.reward, **{k: r.evaluation.report.get(k) for k in ("reason", "controls")}}


@pytest.mark.parametrize("name", NEEDS)
def test_a_repository(cluster, place, name):
    if missing := [t for t in NEEDS[name] if not shutil.which(t)]:
        pytest.skip(f"this machine has no {', '.join(missing)}")
    repo = repos.REPOS[name]
    ids = cluster.submit(
        task(place, repo, "gold", repos.writes(repo.gold)),
        task(place, repo, "empty", "true"),
        task(place, repo, "half", repos.writes(repo.half)),
        task(place, repo, "part", repos.writes(repo.half), partial="fail_to_pass"),
        task(place, repo, "broken", repos.writes(repo.breaking)),
        task(place, repo, "broken-part", repos.writes(repo.breaking), partial="fail_to_pass"),
    )
    gold, empty, half, part, broken, broken_part = cluster.wait(ids, 200)
    found = agree(gold)
    assert (found["verdict"], found["reward"]) == ("passed", 1.0), (gold.evaluation, gold.error)
    assert found["controls"]["kind"] == ("spoiled" if name == "words" else "broken")
    assert {a.name for a in gold.artifacts} >= {"evaluation-try1-patch.diff", "evaluation-try1-tests.log"}
    assert (empty.verdict, empty.reward, empty.evaluation.report["reason"]) == ("failed", 0.0, "empty_patch")
    assert (half.verdict, half.reward) == ("failed", 0.0) and len(
        half.evaluation.report["fail_to_pass"]["failing"]
    ) == 1
    assert (part.verdict, part.reward) == ("partial", 0.5)
    for r in (broken, broken_part):
        assert (r.verdict, r.reward) == ("failed", 0.0) and r.evaluation.report["pass_to_pass"]["passed"] < len(
            repo.pass_to_pass
        )
