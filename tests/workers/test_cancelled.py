"""What ends sessions early (cancel, cancel_rest), when it comes at a bad moment; and the reaper's rounds."""

from __future__ import annotations

import threading

from cli.summary import summarize
from polar.config import Settings
from polar.export import read_result
from polar.result import ErrorInfo, SessionResult
from polar.store.sessions import Hint
from polar.task import EvaluatorSpec, GroupPolicy, RetryPolicy
from tests.workers.cluster import noop, until
from workers import postrun as stage
from workers.context import Context
from workers.failures import fail_attempt
from workers.init import init
from workers.postrun import postrun
from workers.reaper import reap_forever
from workers.run import run

GONE = ErrorInfo(code="worker_lost", message="gone", stage="run", retryable=True)
JUDGE = EvaluatorSpec(name="test_on_output", config={"command": "true"})
ANY_K = GroupPolicy(mode="min_k", k=1, cancel_rest=True)


def result(ctx: Context, sid: str) -> SessionResult:
    return read_result(ctx.objects, ctx.store.session(sid).result)


def to_postrun(ctx: Context, task) -> list[str]:
    """The task's first session is ready for its POSTRUN."""
    ids = ctx.store.submit(task, "local")
    ctx.store.admit(100, 60)
    init(ctx, ids[0])
    run(ctx, ids[0])
    return ids


def test_a_cancel_between_two_attempts_counts_the_attempt_once(ctx):
    (sid,) = ctx.store.submit(noop("t", retry=RetryPolicy(max_attempts=3, backoff_seconds=60)), "local")
    ctx.store.admit(100, 60)
    init(ctx, sid)
    s = ctx.store.begin(sid, "run", "a", "w", 60)
    ctx.store.redis.hset(ctx.keys.attempt(s.attempt_id), mapping={"state": "open", "turns": 1, "sampled_tokens": 100})
    assert fail_attempt(ctx, s, GONE) == "retry"
    ctx.store.cancel(sid)
    postrun(ctx, sid)
    r = result(ctx, sid)
    assert [(a.attempt, a.termination, a.sampled_tokens) for a in r.attempts] == [(1, "cancelled", 100)]
    assert r.termination == "cancelled" and r.reward is None
    assert "failed_attempt" not in summarize([r]).left_out
    assert [(line.attempt, line.error.code) for line in ctx.store.ledger(sid)] == [(1, "worker_lost")]


def test_attempts_before_the_cancelled_one_stay_in_its_result(ctx):
    (sid,) = ctx.store.submit(noop("t", retry=RetryPolicy(max_attempts=3, backoff_seconds=0)), "local")
    for _ in range(2):
        until(lambda: ctx.store.admit(100, 60) or ctx.store.session(sid).state == "ADMITTED")
        init(ctx, sid)
        assert fail_attempt(ctx, ctx.store.begin(sid, "run", "a", "w", 60), GONE) == "retry"
    until(lambda: ctx.store.admit(100, 60) or ctx.store.session(sid).state == "ADMITTED")
    ctx.store.cancel(sid)
    postrun(ctx, sid)
    attempts = [(a.attempt, a.termination) for a in result(ctx, sid).attempts]
    assert attempts == [(1, "infra_error"), (2, "infra_error"), (3, "cancelled")]


def test_cancel_rest_outlives_a_worker_that_fails_right_after_the_commit(ctx, monkeypatch):
    ids = to_postrun(ctx, noop("t", n=3, group=ANY_K, evaluator=JUDGE))

    def dies(attempt: str) -> None:
        raise RuntimeError("the worker's end")

    with monkeypatch.context() as m:
        m.setattr(ctx.capture, "forget", dies)
        postrun(ctx, ids[0])
    assert ctx.store.session(ids[0]).state == "DONE"
    assert [(s.state, s.cancel) for s in ctx.store.sessions(ids[1:])] == [("POSTRUN", True)] * 2
    for sid in ids[1:]:
        postrun(ctx, sid)
        assert result(ctx, sid).termination == "cancelled"
    assert ctx.store.redis.xlen(ctx.keys.groups("results")) == 1


def test_those_that_cancel_rest_ends_are_announced(ctx, monkeypatch):
    ids = to_postrun(ctx, noop("t", n=3, group=ANY_K, evaluator=JUDGE))
    hints: list[Hint] = []
    monkeypatch.setattr(stage, "send", lambda app, h: hints.extend(h))
    postrun(ctx, ids[0])
    assert [(h.stage, h.session_id) for h in hints] == [("postrun", sid) for sid in ids[1:]]


def test_a_long_interval_leaves_the_reaper_its_rounds(tmp_path, redis_url, store):
    """Its wait for the doorbell must end before the socket's own time-out (30 s) does."""
    settings = Settings(namespace="t", data_dir=str(tmp_path), broker=redis_url, reap_interval_seconds=60.0)
    c = Context(settings, "r")
    (sid,) = store.submit(noop("t"), "local")
    store.node_beat("a", ready=1, slots=1, backends=["local"])
    store.redis.delete(store.keys.doorbell)
    reaper = threading.Thread(target=reap_forever, args=(c,))
    reaper.start()
    try:
        until(lambda: store.session(sid).state == "ADMITTED", 25)
    finally:
        c.stopping.set()
        reaper.join()
