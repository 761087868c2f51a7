"""Sessions through real worker processes: happy path, budgets, cancel, kills."""

from __future__ import annotations

import os
import signal

import pytest

from polar.task import EvaluatorSpec, Exec, RetryPolicy, RuntimeSpec
from tests.workers.cluster import Cluster, noop, until

PLAIN = {"isolation": "none"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("cluster")) as c:
        c.workers()
        yield c


def test_a_batch_reaches_done_with_one_result_each(cluster):
    ids = cluster.submit(noop("batch", 6), noop("other", 2, priority=10))
    results = cluster.wait(ids)
    assert [r.termination for r in results] == ["finished"] * 8
    assert all(r.reward is None and r.verdict == "not_evaluated" and len(r.attempts) == 1 for r in results)
    assert set(results[0].timing) >= {"queue", "init", "ready_wait", "run", "postrun_wait", "rebuild", "evaluate"}
    entries = cluster.store.redis.xrange(cluster.store.keys.results("results"))
    assert sum(e[b"task"] in (b"batch", b"other") for _, e in entries) == 8


def test_evaluation_runs_in_a_fresh_sandbox(cluster):
    task = noop(
        "judged",
        2,
        command="echo right > answer.txt; echo planted > only-here.txt",
        evaluator=EvaluatorSpec(
            name="test_on_output",
            config={"command": "test ! -e only-here.txt && grep -q right answer.txt", "collect": ["answer.txt"]},
        ),
    )
    results = cluster.wait(cluster.submit(task))
    assert [(r.verdict, r.reward) for r in results] == [("passed", 1.0)] * 2
    assert {a.name for a in results[0].artifacts} >= {"answer.txt"}


def test_prewarmed_evaluation_is_used_and_removed(cluster):
    evaluator = EvaluatorSpec(name="test_on_output", prewarm=True, config={"command": "test -e warm.txt"})
    spec = RuntimeSpec(backend="local", options=PLAIN, evaluation_prepare=[Exec(command="touch warm.txt")])
    (r,) = cluster.wait(cluster.submit(noop("warm", command="sleep 0.2", evaluator=evaluator, runtime=spec)))
    assert (r.verdict, r.reward) == ("passed", 1.0)


def test_a_timeout_ends_the_agent_and_keeps_the_session(cluster):
    task = noop("slow", command="setsid sleep 600 & sleep 600", timeout_seconds=1.5)
    (r,) = cluster.wait(cluster.submit(task))
    assert r.termination == "agent_timeout" and r.agent["exit_code"] is None
    assert "sleep 600" not in _commands()


def test_a_failing_prepare_step_is_infrastructure_not_a_zero(cluster):
    spec = RuntimeSpec(backend="local", options=PLAIN, prepare=[Exec(command="echo no disk >&2; exit 3")])
    task = noop("unprepared", runtime=spec, retry=RetryPolicy(max_attempts=2, backoff_seconds=0.05))
    (r,) = cluster.wait(cluster.submit(task))
    assert (r.termination, r.reward, r.error.code) == ("infra_error", None, "prepare_failed")
    assert "no disk" in r.error.message and [a.attempt for a in r.attempts] == [1, 2]


def test_an_agent_error_is_the_agents(cluster):
    (r,) = cluster.wait(cluster.submit(noop("crash", command="exit 7")))
    assert (r.termination, r.agent["exit_code"], len(r.attempts)) == ("agent_error", 7, 1)


@pytest.mark.parametrize("command", ["sleep 1; exit 1", "sleep 60"], ids=["error", "timeout"])
def test_an_end_after_the_model_failed_is_not_the_agents(cluster, command):
    task_id = f"unserved{len(command)}"
    once = RetryPolicy(max_attempts=1)
    (name,) = cluster.submit(noop(task_id, command=command, agent_timeout_seconds=2.0, retry=once))
    until(lambda: cluster.store.session(f"{task_id}.s0").state == "RUNNING")
    cluster.store.redis.hset(cluster.store.keys.attempt(f"{task_id}.s0.a1"), "infra", "engine_unavailable: away")
    (r,) = cluster.wait([name])
    assert (r.termination, r.error.code, r.reward) == ("infra_error", "engine_unavailable", None)


def test_cancel_stops_a_running_agent(cluster):
    (task,) = cluster.submit(noop("cancelled", command="sleep 601"))
    until(lambda: cluster.store.session("cancelled.s0").state == "RUNNING")
    cluster.store.cancel("cancelled.s0")
    (r,) = cluster.wait([task])
    assert r.termination == "cancelled" and r.reward is None
    assert "sleep 601" not in _commands()


def test_cancel_stops_a_prepare_step(cluster):
    spec = RuntimeSpec(backend="local", options=PLAIN, prepare=[Exec(command="sleep 603")])
    (task,) = cluster.submit(noop("unwanted", runtime=spec))
    until(lambda: "sleep 603" in _commands())
    cluster.store.cancel("unwanted.s0")
    (r,) = cluster.wait([task])
    assert (r.termination, r.reward, len(r.attempts)) == ("cancelled", None, 1)
    assert "sleep 603" not in _commands()


def test_kill_of_a_run_and_a_postrun_worker_loses_and_doubles_nothing(tmp_path):
    with Cluster(tmp_path / "c") as c:
        c.workers(slots=4)
        (task,) = c.submit(
            noop("fifty", 50, command="sleep 0.2", retry=RetryPolicy(max_attempts=5, backoff_seconds=0.1))
        )
        for name in ("worker-run-a", "worker-postrun-a"):
            until(lambda: c.store.task_status(task).done >= 5)
            os.kill(c.processes[name].popen.pid, signal.SIGKILL)
        results = c.wait([task])
        assert {r.session_id for r in results} == {f"fifty.s{i}" for i in range(50)}
        assert {r.termination for r in results} == {"finished"}
        published = [e[b"session"] for _, e in c.store.redis.xrange(c.store.keys.results("results"))]
        assert len(published) == len(set(published)) == 50
        assert c.processes["worker-run-a"].started == c.processes["worker-postrun-a"].started == 2
        # Once the janitor came round, nothing of the killed attempts is left; nor of what their workers held.
        until(lambda: not list((tmp_path / "c" / "sandboxes").glob("*")), 60)
        until(lambda: not list((tmp_path / "c" / "scratch").glob("*/*")))


def _commands() -> str:
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                out.append(f.read().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(out)


def test_a_lost_node_gives_its_sessions_to_the_others(tmp_path):
    with Cluster(tmp_path / "c") as c:
        c.worker("reaper")
        c.worker("postrun")
        lost = [c.worker("init", node="b", restarts=False), c.worker("run", node="b", slots=2, restarts=False)]
        (task,) = c.submit(
            noop("moved", 12, command="sleep 0.5", retry=RetryPolicy(max_attempts=5, backoff_seconds=0.1))
        )
        until(lambda: c.store.task_status(task).done >= 2)
        for p in lost:
            os.kill(p.popen.pid, signal.SIGKILL)
        c.worker("init", node="a")
        c.worker("run", node="a", slots=4)
        results = c.wait([task])
        assert {r.termination for r in results} == {"finished"} and len(results) == 12
        assert {r.node for r in results} == {"a", "b"}
        lost_codes = {line.error.code for r in results for line in r.attempts[:-1]}
        assert lost_codes and lost_codes <= {"node_lost", "worker_lost"}
        # It is the same machine: its sweep takes what the other name left.
        until(lambda: not list((tmp_path / "c" / "sandboxes").glob("*")), 60)


def test_kill_of_the_broker_loses_and_doubles_nothing(tmp_path):
    with Cluster(tmp_path / "c") as c:
        c.workers(slots=4)
        (task,) = c.submit(
            noop("thirty", 30, command="sleep 0.2", retry=RetryPolicy(max_attempts=5, backoff_seconds=0.1))
        )
        until(lambda: c.store.task_status(task).done >= 5)
        os.kill(c.processes["redis"].popen.pid, signal.SIGKILL)
        until(lambda: c.processes["redis"].started == 2 and _answers(c))
        results = c.wait([task])
        assert {r.termination for r in results} == {"finished"} and len(results) == 30
        published = [e[b"session"] for _, e in c.store.redis.xrange(c.store.keys.results("results"))]
        assert len(published) == len(set(published)) == 30


def _answers(c: Cluster) -> bool:
    try:
        return bool(c.store.redis.ping())
    except Exception:
        return False
