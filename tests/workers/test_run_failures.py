"""What a failure of the machinery around RUN may not take along: a finished attempt, the real reason, the log and files."""

from __future__ import annotations

import msgspec
import pytest

from polar.codec import decompress, unpack
from polar.errors import InfraError
from polar.result import Artifact, SessionResult
from polar.sandbox import LABEL_ATTEMPT
from polar.task import AgentSpec, EvaluatorSpec, Exec, RetryPolicy, RuntimeSpec
from runtimes.local_sandbox import LocalSandbox
from tests.workers.cluster import noop, until
from tests.workers.versioned_agent import VersionedAgent
from workers.cleanup import sweep
from workers.collect import LOG_LIMIT
from workers.context import Context
from workers.init import init
from workers.postrun import MAX_TRIES, postrun
from workers.reaper import reap_once
from workers.run import run

PLAIN = {"isolation": "none"}
ONCE = RetryPolicy(max_attempts=1)
WORK = "echo work > work.txt; echo what it said; exit 1"


class Asking(VersionedAgent):
    requires_completions = True


def admitted(ctx: Context, task) -> str:
    ctx.store.submit(task, "local")
    ctx.store.admit(100, 60)
    return f"{task.task_id}.s0"


def ended(ctx: Context, sid: str) -> SessionResult:
    postrun(ctx, sid)
    return unpack(decompress(ctx.objects.get(ctx.store.session(sid).result)), SessionResult)


def model_failed(ctx: Context, sid: str, attempt: int = 1) -> None:
    ctx.store.redis.hset(ctx.keys.attempt(f"{sid}.a{attempt}"), "infra", "engine_unavailable: away")


def read(ctx: Context, artifacts: list[Artifact]) -> dict[str, bytes]:
    return {a.name: ctx.objects.get(a.key) for a in artifacts}


def left(ctx: Context) -> list[str]:
    return [ref.labels[LABEL_ATTEMPT] for ref in ctx.runtime("local").list({})]


@pytest.fixture
def stuck(monkeypatch):
    """No sandbox can be removed. Call it to end that."""

    def destroy(self) -> None:
        raise OSError("the disk is busy")

    monkeypatch.setattr(LocalSandbox, "destroy", destroy)
    return monkeypatch.undo


@pytest.mark.parametrize("state", ["POSTRUN", "DONE"])
def test_a_sandbox_that_stays_costs_no_finished_attempt_and_is_swept(ctx, stuck, state):
    sid = admitted(ctx, noop("kept"))
    init(ctx, sid)
    assert sweep(ctx) == 0 and ctx.store.session(sid).state == "READY"
    run(ctx, sid)
    assert ctx.store.session(sid).state == "POSTRUN" and left(ctx) == [f"{sid}.a1"]
    if state == "DONE":
        r = ended(ctx, sid)
        assert (r.termination, r.attempt, r.error) == ("finished", 1, None)
    assert sweep(ctx) == 0  # and says so
    stuck()
    assert ctx.store.session(sid).state == state and sweep(ctx) == 1 and left(ctx) == []


def test_a_backend_that_cant_be_asked_hides_no_other(ctx, stuck, monkeypatch, caplog):
    sid = admitted(ctx, noop("others"))
    init(ctx, sid)
    run(ctx, sid)
    stuck()
    real = ctx.runtime

    def runtime(name: str):
        if name == "broken":
            raise OSError("its records can't be read")
        return real(name)

    monkeypatch.setattr(ctx, "runtime", runtime)
    monkeypatch.setattr("workers.cleanup.backends", lambda ctx: ["broken", "local"])
    assert sweep(ctx) == 1 and left(ctx) == []
    assert "its records can't be read" in caplog.text


def test_a_sandbox_that_stays_hides_no_failed_preparation(ctx, stuck):
    spec = RuntimeSpec(backend="local", options=PLAIN, prepare=[Exec(command="echo no disk >&2; exit 3")])
    sid = admitted(ctx, noop("unprepared", runtime=spec, retry=ONCE))
    init(ctx, sid)
    s = ctx.store.session(sid)
    assert s.state == "POSTRUN" and s.error and s.error.code == "prepare_failed" and "no disk" in s.error.message
    stuck()
    assert sweep(ctx) == 1 and left(ctx) == []


def test_a_sandbox_that_stays_costs_no_verdict(ctx, stuck):
    judge = EvaluatorSpec(name="test_on_output", config={"command": "true"})
    sid = admitted(ctx, noop("judged", evaluator=judge))
    init(ctx, sid)
    run(ctx, sid)
    r = ended(ctx, sid)
    assert r.evaluation and (r.verdict, r.reward, r.evaluation.attempts) == ("passed", 1.0, 1)
    stuck()
    assert sweep(ctx) == 2 and left(ctx) == []


def test_one_sandbox_that_stays_keeps_no_other(ctx, monkeypatch):
    for name in ("one", "two", "three"):
        sid = admitted(ctx, noop(name))
        init(ctx, sid)
        ctx.store.cancel(sid)
    removed, whole = [], LocalSandbox.destroy

    def destroy(self) -> None:
        if "two" in self.ref.labels[LABEL_ATTEMPT]:
            raise OSError("the disk is busy")
        whole(self)
        removed.append(self)

    monkeypatch.setattr(LocalSandbox, "destroy", destroy)
    assert sweep(ctx) == len(removed) == 2 and left(ctx) == ["two.s0.a1"]


def test_every_failed_attempt_names_its_own_log_and_files(ctx):
    retry = RetryPolicy(max_attempts=2, backoff_seconds=0)
    sid = admitted(
        ctx, noop("away", command=f"date +%s%N > id; {WORK}", artifacts=["id", "work.txt", "no"], retry=retry)
    )
    for attempt in (1, 2):
        until(lambda: ctx.store.admit(100, 60) or ctx.store.session(sid).state == "ADMITTED")
        init(ctx, sid)
        model_failed(ctx, sid, attempt)
        run(ctx, sid)
    assert ctx.store.session(sid).state == "POSTRUN"
    r = ended(ctx, sid)
    assert r.error and (r.termination, r.reward, r.error.code) == ("infra_error", None, "engine_unavailable")
    assert [line.attempt for line in r.attempts] == [1, 2] and r.attempts[1].artifacts == r.artifacts
    assert [line.error.code for line in ctx.store.ledger(sid) if line.error] == ["engine_unavailable"] * 2
    first, second = (read(ctx, line.artifacts) for line in ctx.store.ledger(sid))
    assert set(first) == set(second) == {"agent.log", "id", "work.txt"}
    assert first["agent.log"] == second["agent.log"] == b"what it said\n"
    assert first["id"] != second["id"]  # neither overwrote the other
    assert left(ctx) == []


def test_the_log_is_kept_when_the_command_itself_is_lost(ctx, monkeypatch):
    sid = admitted(ctx, noop("lost", command=WORK, artifacts=["work.txt"], retry=ONCE))
    init(ctx, sid)
    whole = LocalSandbox.exec

    def lost(self, *args, **kw):
        whole(self, *args, **kw)
        raise InfraError("the container went away while a command ran", code="exec_failed")

    monkeypatch.setattr(LocalSandbox, "exec", lost)
    run(ctx, sid)
    r = ended(ctx, sid)
    assert r.error and (r.termination, r.error.code) == ("infra_error", "exec_failed")
    assert read(ctx, r.artifacts) == {"agent.log": b"what it said\n", "work.txt": b"work\n"}


@pytest.mark.parametrize("broken", ["objects", "sandbox"])
def test_what_cant_be_kept_hides_no_reason(ctx, monkeypatch, broken):
    sid = admitted(ctx, noop("reason", command=WORK, artifacts=["work.txt"], retry=ONCE))
    init(ctx, sid)
    model_failed(ctx, sid)

    def refused(*_args, **_kw):
        raise InfraError("away", code="store_unavailable")

    if broken == "objects":
        monkeypatch.setattr(ctx.objects, "put_file", refused)
    else:
        monkeypatch.setattr(LocalSandbox, "download", refused)
    run(ctx, sid)
    monkeypatch.undo()
    r = ended(ctx, sid)
    assert r.error and (r.termination, r.error.code) == ("infra_error", "engine_unavailable")
    assert [a.name for a in r.artifacts] == ([] if broken == "objects" else ["agent.log"])


def test_an_agent_that_hung_without_a_model_call_is_said_to(ctx):
    settings = {"version": ["echo", "1.0"], "run": "echo waiting; sleep 60"}
    agent = AgentSpec(import_path=f"{__name__}:Asking", settings=settings)
    once = RetryPolicy(empty_generations=0)
    task = noop("hung", agent_timeout_seconds=2.0, retry=once)
    task.agent = agent
    sid = admitted(ctx, task)
    init(ctx, sid)
    run(ctx, sid)
    r = ended(ctx, sid)
    assert r.error and r.error.code == "no_completions"
    assert r.error.message.startswith("the agent was stopped at its time limit (")
    assert r.error.message.endswith(" s) without a model call: waiting") and "exit code" not in r.error.message
    assert read(ctx, r.artifacts) == {"agent.log": b"waiting\n"}


@pytest.mark.parametrize("end", ["exit 7", "exit 0"])
def test_a_log_that_is_cut_says_so_and_keeps_its_end(ctx, end):
    more = LOG_LIMIT + 1000
    sid = admitted(ctx, noop("loud", command=f"echo begun; yes | head -c {more}; echo the error; {end}"))
    init(ctx, sid)
    run(ctx, sid)
    r = ended(ctx, sid)
    (log,) = r.artifacts
    assert log.truncated and log.size == LOG_LIMIT
    text = ctx.objects.get(log.key)
    assert text.startswith(b"begun\ny\n") and text.endswith(b"y\nthe error\n") and b" bytes left out]" in text


def test_a_log_that_is_whole_does_not(ctx):
    sid = admitted(ctx, noop("quiet", command="echo all"))
    init(ctx, sid)
    run(ctx, sid)
    assert [(a.name, a.size, a.truncated) for a in ended(ctx, sid).artifacts] == [("agent.log", 4, False)]


def newer(ctx: Context, task_id: str) -> None:
    """As a submitter of a later version wrote it."""
    spec = msgspec.msgpack.decode(ctx.store.redis.hget(ctx.keys.task(task_id), "spec"))
    ctx.store.redis.hset(ctx.keys.task(task_id), "spec", msgspec.msgpack.encode(spec | {"new_field": 1}))


def test_a_task_that_nobody_here_can_read_ends_and_stops_no_other(ctx):
    sid = admitted(ctx, noop("newer", results_queue="mine"))
    newer(ctx, "newer")
    for _ in range(RetryPolicy().max_attempts):  # the task's own policy is unreadable, too
        init(ctx, sid)
        ctx.store.redis.zadd(ctx.keys.delayed, {sid: 0}, xx=True)
        ctx.store.admit(100, 60)
    s = ctx.store.session(sid)
    assert (s.state, s.termination, s.error.code) == ("POSTRUN", "infra_error", "unreadable")
    for _ in range(MAX_TRIES):
        postrun(ctx, sid)
        assert ctx.store.session(sid).state == "POSTRUN"  # for a worker that can read it
    result = ended(ctx, sid)
    assert (result.termination, result.reward, result.error.code) == ("infra_error", None, "unreadable")
    assert ctx.store.redis.xlen(ctx.keys.results("mine")) == 1


def test_the_reaper_goes_on_behind_a_session_that_it_cant_reap(ctx, monkeypatch):
    bad, good = admitted(ctx, noop("bad")), admitted(ctx, noop("good"))
    for sid in (bad, good):
        assert ctx.store.begin(sid, "init", "a", "dead", 60.0)
    ctx.store.redis.zadd(ctx.keys.leases, {bad: 1, good: 2}, xx=True)
    task = ctx.store.task
    monkeypatch.setattr(ctx.store, "task", lambda t: 1 / 0 if t == "bad" else task(t))
    reap_once(ctx)
    assert ctx.store.session(bad).state == "INITIALIZING" and ctx.store.session(good).state != "INITIALIZING"


def test_a_name_that_is_used_again_gets_a_result_of_its_own(ctx):
    """The store may have forgotten the first, or be another one."""
    task = noop("same", command="true")
    for times in (1, 2):
        sid = admitted(ctx, task)
        init(ctx, sid)
        run(ctx, sid)
        created = ctx.store.session(sid).created
        assert ended(ctx, sid).created_at == created
        assert ctx.store.redis.xlen(ctx.keys.results("results")) == times
        assert ctx.store.forget("same", ctx.store.now() + 1)
