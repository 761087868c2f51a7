"""Warm sandboxes in real worker processes: used by sessions, gone after SIGTERM, swept after kill -9."""

from __future__ import annotations

import os
import signal

import pytest

from polar.sandbox import LABEL_NAMESPACE, LABEL_PURPOSE
from polar.task import EvaluatorSpec, Exec, RuntimeSpec
from runtimes.docker import DockerRuntime
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import LABEL_OWNER, PURPOSE
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image
from tests.workers.cluster import Cluster, noop, until
from workers import cleanup
from workers.context import Context


@pytest.fixture
def cluster(tmp_path):
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    with Cluster(tmp_path / "c", runtimes=["docker"], default_runtime="docker", warm_sandboxes=2) as c:
        yield c
    engine = DockerRuntime(c.settings)
    for ref in engine.list({LABEL_NAMESPACE: c.settings.namespace}):
        engine.attach(ref).destroy()


@pytest.mark.docker
def test_sessions_use_them_and_every_end_of_a_worker_removes_them(cluster):
    engine = DockerRuntime(cluster.settings)
    mine = {LABEL_NAMESPACE: cluster.settings.namespace}
    ledger = Ledger(cluster.store.redis, cluster.store.keys, "a", "docker", cluster.settings.node_timeout_seconds)
    ctx = Context(cluster.settings, "a")

    def owners() -> set[str]:
        """Of idle ones."""
        idle = engine.list({**mine, LABEL_PURPOSE: PURPOSE})
        return {r.labels[LABEL_OWNER] for r in idle if r.handle not in ledger.records()}

    def batch(name: str, n: int) -> None:
        spec = RuntimeSpec(backend="docker", image=IMAGE, prepare=[Exec(command=f"echo {name} > mine.txt")])
        judge = EvaluatorSpec(
            name="test_on_output", config={"command": f"test ! -e left.txt && grep -qx {name} mine.txt"}
        )
        task = noop(name, n, command=f"grep -qx {name} mine.txt && touch left.txt", runtime=spec, evaluator=judge)
        results = cluster.wait(cluster.submit(task))
        assert [(r.termination, r.reward) for r in results] == [("finished", 1.0)] * n

    init = cluster.worker("init", "reaper")
    for stage in ("run", "postrun"):
        cluster.worker(stage)
    batch("first", 4)
    until(lambda: len(owners()) == 2)  # INIT's and POSTRUN's: each keeps what it makes
    handed_out = set(ledger.records())
    batch("second", 3)
    assert set(ledger.records()) - handed_out, "no session got a warm one"
    # Nothing but idle ones is left of the sessions.
    until(lambda: all(r.labels[LABEL_PURPOSE] == PURPOSE for r in engine.list(mine)))

    # A worker that is asked to end takes its own with it, and nobody else's.
    before = owners()
    os.kill(init.popen.pid, signal.SIGTERM)
    until(lambda: len(owners()) == 1 and owners() < before)
    # One that is killed leaves them, and the sweep of another removes them once it counts as dead.
    (dead,) = owners()
    postrun = cluster.processes["worker-postrun-a"]
    os.kill(postrun.popen.pid, signal.SIGKILL)
    assert owners() == {dead}

    def gone() -> bool:
        cleanup.sweep(ctx)
        return dead not in owners()

    until(gone)
    batch("third", 2)  # on the workers that the supervisor started anew
