"""The agent's program is asked for its version before it is launched: what is missing, late, loud or curious then."""

from __future__ import annotations

import os
import uuid

import pytest

from harness_adapters.versions import versions
from polar.result import SessionResult
from polar.task import AgentSpec, RetryPolicy, RuntimeSpec, TaskRequest
from tests.workers.cluster import Cluster, noop, until
from workers.version import judged

PI = versions().harnesses["pi"].version


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as c:
        c.workers()
        yield c


def task(version: str | list[str], run: str = "true", **changes) -> TaskRequest:
    argv = ["/bin/sh", "-c", version] if isinstance(version, str) else version
    agent = AgentSpec(
        import_path="tests.workers.versioned_agent:VersionedAgent", settings={"version": argv, "run": run}
    )
    return TaskRequest(
        task_id=f"v-{uuid.uuid4().hex[:12]}",
        instruction="none",
        agent=agent,
        runtime=RuntimeSpec(backend="local", options={"isolation": "none"}),
        retry=RetryPolicy(max_attempts=3, backoff_seconds=0.05),
        **changes,
    )


def run(cluster: Cluster, wanted: TaskRequest) -> SessionResult:
    (result,) = cluster.wait(cluster.submit(wanted))
    return result


def test_what_it_says_is_in_the_notes_and_the_agent_has_no_say(cluster):
    result = run(cluster, task("echo WARNING: no colours; echo my-agent 3.2.1-beta.4"))
    assert (result.termination, result.agent["notes"]) == ("finished", {"version": "3.2.1-beta.4"})


def test_a_harness_without_a_version_is_asked_for_none(cluster):
    result = run(cluster, noop(f"v-{uuid.uuid4().hex[:12]}"))
    assert (result.termination, result.agent["notes"]) == ("finished", {})


@pytest.mark.parametrize(
    ("version", "names"),
    [
        (["/no/such/agent", "--version"], "/no/such/agent"),
        ("exec no-such-agent --version", "no-such-agent"),
        ("touch program; exec ./program", "program"),  # there, but nothing to run
    ],
)
def test_a_missing_program_is_said_so_once(cluster, version, names):
    result = run(cluster, task(version, run="touch ran.txt", artifacts=["ran.txt"]))
    assert (result.termination, result.reward, len(result.attempts)) == ("infra_error", None, 1)
    assert (result.error.code, result.error.retryable) == ("harness_missing", False)
    assert names in result.error.message and "docs/harnesses.md" in result.error.message
    assert not result.artifacts  # the agent was not launched


@pytest.mark.parametrize(
    ("version", "note"),
    [
        ("echo broken >&2; exit 3", "exit code 3: broken"),
        ("echo no number", "said no version: no number"),
        ("kill -9 $$", "exit code 137"),
    ],
)
def test_a_version_that_cant_be_told_is_a_note(cluster, version, note):
    result = run(cluster, task(version))
    assert result.termination == "finished" and note in result.agent["notes"]["version_note"]


def test_a_program_that_hangs_costs_the_agent_nothing_of_its_own_time(cluster):
    length = f"600.{os.getpid()}"
    result = run(cluster, task(f"sleep {length} & sleep {length}", run="sleep 1", agent_timeout_seconds=4.0))
    assert result.termination == "finished" and result.agent["notes"]["version_note"] == "no answer within 4 s"
    assert not [p for p in os.listdir("/proc") if p.isdigit() and length in _line(p)]


def test_it_may_not_use_up_the_shared_time(cluster):
    result = run(cluster, task("sleep 600", run="touch ran.txt", artifacts=["ran.txt"], timeout_seconds=1.5))
    assert (result.termination, result.error.code, result.artifacts) == ("infra_error", "prepare_failed", [])


def test_what_it_writes_is_bounded(cluster):
    result = run(cluster, task("head -c 60000000 /dev/zero | tr '\\0' x; echo; echo agent 9.9"))
    assert result.termination == "finished" and result.agent["notes"]["version"] == "9.9"
    assert not any(a.size > 1000 for a in result.artifacts)


def test_it_knows_no_way_to_the_model(cluster):
    """A wrapper that ignores `--version` would start the agent: then without the session's capability."""
    result = run(cluster, task("env >asked.txt; echo 1.0", run="env >ran.txt", artifacts=["asked.txt", "ran.txt"]))
    text = {a.name: cluster.objects.get(a.key).decode() for a in result.artifacts if a.name.endswith(".txt")}
    assert "OPENAI_API_KEY=" in text["ran.txt"] and "/s/" in text["ran.txt"]
    assert "OPENAI" not in text["asked.txt"] and "/s/" not in text["asked.txt"] and "QUIET=1" in text["asked.txt"]


def test_cancel_ends_it(cluster):
    wanted = task("sleep 600")
    (name,) = cluster.submit(wanted)
    until(lambda: cluster.store.session(f"{name}.s0").state == "RUNNING")
    cluster.store.cancel(f"{name}.s0")
    (result,) = cluster.wait([name], 25)
    assert (result.termination, result.error) == ("cancelled", None)


@pytest.mark.parametrize(
    ("said", "notes"),
    [
        (f"{PI}\n", {"version": PI}),
        (f"Node 99.1 is new\npi {PI} (a build)\nplease update to 99.2.0\n", {"version": PI}),
        ("pi 0.9.1\n", {"version": "0.9.1", "version_note": f"tested is {PI}"}),
        ("", {"version_note": "said no version: "}),
        ("1." + "9" * 500, {"version": "1." + "9" * 98, "version_note": f"tested is {PI}"}),
    ],
)
def test_another_version_than_the_tested_one_is_a_note(said, notes):
    assert judged(said, "pi") == notes


def _line(pid: str) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return f.read().decode(errors="replace")
    except OSError:
        return ""
