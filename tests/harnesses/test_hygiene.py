"""What an agent leaves behind, or does to those around it, through the RUN stage of real workers."""

from __future__ import annotations

import os
import uuid

import pytest

from polar.config import Settings
from polar.result import SessionResult
from polar.task import AgentSpec, RetryPolicy, RuntimeSpec, TaskRequest
from runtimes import bwrap
from runtimes.docker import DockerRuntime
from tests.workers.cluster import Cluster

IMAGE = "polar-sandbox:base"
BACKENDS = ["bwrap", pytest.param("docker", marks=pytest.mark.docker)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("hygiene")) as c:
        c.workers(slots=4)
        yield c


@pytest.fixture(params=BACKENDS)
def spec(request, cluster) -> RuntimeSpec:
    if request.param == "bwrap":
        if isinstance(found := bwrap.find(), str):
            pytest.skip(f"no working bubblewrap: {found}")
        return RuntimeSpec(backend="local", options={"isolation": "bwrap"})
    runtime = DockerRuntime(Settings(data_dir=str(cluster.folder)))
    if not (found := runtime.available())[0]:
        pytest.skip(f"no Docker engine: {found[1]}")
    if os.system(f"docker image inspect {IMAGE} >/dev/null 2>&1"):
        pytest.skip(f"no image {IMAGE} (compose/base_image.py makes it)")
    return RuntimeSpec(backend="docker", image=IMAGE)


def run(cluster: Cluster, spec: RuntimeSpec, command: str, **changes) -> SessionResult:
    changes.setdefault("agent", AgentSpec(harness="shell", command=command or "true"))
    task = TaskRequest(
        task_id=f"t-{uuid.uuid4().hex[:12]}",
        instruction="none",
        runtime=spec,
        retry=RetryPolicy(max_attempts=3, backoff_seconds=0.1),
        **changes,
    )
    (result,) = cluster.wait(cluster.submit(task), 120)
    return result


def alive(mark: str) -> list[str]:
    """Command lines of this machine's processes that carry the mark; containers' processes are among them."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mark in line:
            found.append(line)
    return found


ESCAPES = {
    "forked": "sleep {m} & sleep {m}",
    "own session": "setsid sleep {m} & sleep {m}",
    "double fork": "( ( sleep {m} & ) & ); sleep {m}",
    "detached": "( setsid sh -c 'setsid sleep {m} </dev/null >/dev/null 2>&1 &' & ); sleep {m}",
    "renamed": "bash -c 'exec -a innocent sleep {m}' & sleep {m}",
    "ignores TERM": "sh -c \"trap '' TERM INT HUP; while :; do sleep {m}; done\" & sleep {m}",
    "stopped": "sleep {m} & kill -STOP $!; sleep {m}",
    "without environment": "env -i setsid sleep {m} & sleep {m}",
}  # fmt: skip


def test_nothing_is_left_after_a_timeout(cluster, spec):
    """All ways out at once, told apart by how long they would sleep."""
    base = 100_000 + int(uuid.uuid4().hex[:6], 16) % 800_000
    marks = [f"{base + i}.{os.getpid()}" for i in range(len(ESCAPES))]
    parts = [f"( {c.format(m=m)} ) &" for m, c in zip(marks, ESCAPES.values(), strict=True)]
    result = run(cluster, spec, " ".join([*parts, "wait"]), agent_timeout_seconds=3.0)
    assert result.termination == "agent_timeout" and len(result.attempts) == 1
    left = {how: alive(m) for how, m in zip(ESCAPES, marks, strict=True) if alive(m)}
    assert not left


def test_nothing_is_left_after_the_agent_went(cluster, spec):
    mark = f"{900_000 + int(uuid.uuid4().hex[:5], 16)}.{os.getpid()}"
    result = run(cluster, spec, f"setsid nohup sleep {mark} >/dev/null 2>&1 & sleep 0.2; echo gone")
    assert result.termination == "finished" and not alive(mark)


def test_orphans_are_reaped(cluster, spec):
    """A thousand orphans, and none of them is a zombie while the agent still works."""
    command = (
        "for i in $(seq 200); do ( ( true & ) & ); done; sleep 1; "
        "n=0; for f in /proc/[0-9]*/stat; do read -r line <$f 2>/dev/null && case $line in *') Z '*) n=$((n+1));; esac; done; "
        "echo zombies $n; test $n -lt 5"
    )
    result = run(cluster, spec, command)
    assert result.termination == "finished", result.agent


@pytest.mark.parametrize("command", ["/no/such/pi", "no-such-pi"])
def test_an_image_without_the_cli_is_said_so_at_once(cluster, spec, command):
    agent = AgentSpec(harness="pi", settings={"command": command})
    result = run(cluster, spec, "", agent=agent)
    assert (result.termination, result.reward, len(result.attempts)) == ("infra_error", None, 1)
    assert result.error.code == "harness_missing"
    for part in (command, "/opt/polar/pi/bin:", "docs/harnesses.md"):  # what, where it was looked for, and what to do
        assert part in result.error.message


def test_a_cli_that_asks_nothing_is_tried_again_and_never_a_zero(cluster, spec):
    agent = AgentSpec(harness="pi", settings={"command": "true"})
    result = run(cluster, spec, "", agent=agent)
    assert (result.termination, result.reward, result.error.code) == ("infra_error", None, "no_completions")
    assert len(result.attempts) == 2


def test_output_is_bounded(cluster, spec):
    result = run(cluster, spec, "head -c 60000000 /dev/zero | tr '\\0' x; echo; echo the end")
    (log,) = [a for a in result.artifacts if a.name == "agent.log"]
    assert result.termination == "finished" and log.size <= 16 * 1024 * 1024


@pytest.mark.parametrize(
    "kill", ["kill -9 -1", "kill -TERM -1; kill -9 -1", "pkill -9 .", "pkill -9 -f python; pkill -9 sh; kill -9 $$"]
)
def test_an_agent_that_kills_all_it_sees_hits_only_itself(cluster, spec, kill):
    before = {name: p.started for name, p in cluster.processes.items()}
    result = run(cluster, spec, f"echo made > made.txt; {kill}; sleep 3", artifacts=["made.txt"])
    # The agent's own doing, so no failure of the machinery, and no second attempt. `kill -1` spares who calls it: whether
    # that is all there was of the agent depends on what the back-end put between.
    assert result.termination in ("agent_error", "finished") and len(result.attempts) == 1, (result.error, result.agent)
    assert "made.txt" in {a.name for a in result.artifacts}
    assert {name: p.started for name, p in cluster.processes.items()} == before
    assert run(cluster, spec, "true").termination == "finished"
