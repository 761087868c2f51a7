"""The session store against a real server: transitions, leases, fences, exactly-once commit."""

from __future__ import annotations

import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.errors import Conflict, LeaseLost, NotFound
from polar.result import ErrorInfo, LedgerLine
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, GroupPolicy, TaskRequest
from workers.retention import forget

STRICT = GroupPolicy()
LINE = LedgerLine(session_id="x", attempt=1)
ERROR = ErrorInfo(code="worker_lost", message="gone", retryable=True)


def task(name: str = "t1", n: int = 1, **kw) -> TaskRequest:
    return TaskRequest(
        agent=AgentSpec(harness="shell", command="true"), instruction="go", task_id=name, num_samples=n, **kw
    )


def admitted(store: SessionStore, n: int = 1, ready: int = 8, **kw) -> list[str]:
    store.submit(task(n=n, **kw), "local")
    store.node_beat("a", ready=ready, slots=4, backends=["local"])
    return [s for s, _ in store.admit(100, 60)]


def to_postrun(store: SessionStore, sid: str) -> None:
    s = store.begin(sid, "init", "a", "w", 60)
    assert s and store.advance(s, "READY", sandbox=b"box") == "READY"
    s = store.begin(sid, "run", "a", "w", 60)
    assert s and s.sandbox == b"box" and store.advance(s, "POSTRUN", run_report=b"r") == "POSTRUN"


def test_one_session_travels_the_whole_way(store):
    (sid,) = admitted(store)
    to_postrun(store, sid)
    s = store.begin(sid, "postrun", "a", "w", 60)
    assert store.commit(s, "k", "finished", "passed", 1.0, LINE, STRICT) == []
    done = store.session(sid)
    assert (done.state, done.verdict, done.reward, done.attempt) == ("DONE", "passed", 1.0, 1)
    assert 0 < done.created <= done.init_started <= done.ready_at <= done.run_started <= done.run_ended <= done.done_at
    assert store.redis.xlen(store.keys.results("results")) == 1
    assert store.redis.xlen(store.keys.groups("results")) == 1
    assert store.backlog() == {"pending": 0, "delayed": 0, "postrun": 0, "open": 0}
    assert store.wait(["t1"], 0)


def test_a_task_id_is_taken_once(store):
    store.submit(task(), "local")
    with pytest.raises(Conflict):
        store.submit(task(n=3), "local")
    assert store.task_status("t1").total == 1
    with pytest.raises(NotFound):
        store.task("other")


def test_a_doubled_message_is_a_no_op(store):
    (sid,) = admitted(store)
    assert store.begin(sid, "run", "a", "w", 60) is None
    assert store.begin(sid, "init", "b", "w", 60) is None, "another node's message"
    assert store.begin(sid, "init", "a", "w", 60)
    assert store.begin(sid, "init", "a", "w2", 60) is None


def test_an_old_fence_writes_nothing(store):
    (sid,) = admitted(store)
    old = store.begin(sid, "init", "a", "w", 0.001)
    assert [s.session_id for s in _until(lambda: store.expired())] == [sid]
    assert store.fail(old, LINE, ERROR, retry=True, delay=0, mode="expired") == "retry"
    assert store.fail(old, LINE, ERROR, retry=True, delay=0, mode="worker") == "stale"
    with pytest.raises(LeaseLost):
        store.advance(old, "READY", sandbox=b"stale")
    assert store.session(sid).state == "PENDING" and store.session(sid).sandbox == b""
    assert store.renew([(sid, old.fence)], 60) == [0]
    assert store.redis.zrange(store.keys.cleanup, 0, -1) == [f"a|{sid}.a1".encode()]
    assert store.admit(100, 60) == [(sid, "a")]
    assert store.session(sid).attempt == 2 and len(store.ledger(sid)) == 1


def test_a_renewed_lease_does_not_expire(store):
    (sid,) = admitted(store)
    s = store.begin(sid, "init", "a", "w", 0.05)
    assert store.renew([(sid, s.fence)], 60) == [1]
    assert store.expired() == []
    assert store.fail(s, LINE, ERROR, retry=True, delay=0, mode="expired") == "stale"


def test_spent_retries_end_in_postrun_with_a_result(store):
    (sid,) = admitted(store)
    s = store.begin(sid, "init", "a", "w", 60)
    assert store.fail(s, LINE, ERROR, retry=False, delay=0, mode="worker") == "postrun"
    s = store.begin(sid, "postrun", "a", "w", 60)
    assert s.termination == "infra_error" and s.error.code == "worker_lost"
    assert store.commit(s, "k", "infra_error", "not_evaluated", None, LINE, STRICT) == []
    assert store.session(sid).reward is None


def test_commit_happens_once_even_when_two_workers_try(store):
    (sid,) = admitted(store)
    to_postrun(store, sid)
    first = store.begin(sid, "postrun", "a", "w1", 0.001)
    _until(lambda: store.expired())
    assert store.release(sid, first.fence, mode="expired")
    second = store.begin(sid, "postrun", "b", "w2", 60)
    with pytest.raises(LeaseLost):
        store.commit(first, "k1", "finished", "passed", 1.0, LINE, STRICT)
    store.commit(second, "k2", "finished", "failed", 0.0, LINE, STRICT)
    assert store.commit(second, "k2", "finished", "failed", 0.0, LINE, STRICT) == [], "said again after a lost answer"
    assert store.task_status("t1").done == 1 and len(store.ledger(sid)) == 1
    assert store.redis.xlen(store.keys.results("results")) == 1
    assert store.session(sid).result == "k2"


def test_admission_keeps_the_ready_bound_priority_and_back_pressure(store):
    store.submit(task("low", 3), "local")
    store.submit(task("high", 2, priority=50), "local")
    store.submit(task("elsewhere", 1, priority=100), "docker")
    store.node_beat("a", ready=3, slots=4, backends=["local"])
    assert [s for s, _ in store.admit(100, 60)] == ["high.s0", "high.s1", "low.s0"]
    assert store.admit(100, 60) == [], "no READY place is free"
    s = store.begin("high.s0", "init", "a", "w", 60)
    store.advance(s, "READY", sandbox=b"")
    assert store.admit(100, 60) == [], "READY still holds its place"
    s = store.begin("high.s0", "run", "a", "w", 60)
    store.advance(s, "POSTRUN")
    assert store.admit(1, 60) == [], "POSTRUN's backlog is at its limit"
    assert [s for s, _ in store.admit(2, 60)] == ["low.s1"]


def test_nodes_share_and_dead_or_draining_ones_get_nothing(store):
    store.submit(task(n=6), "local")
    for node in ("a", "b", "c"):
        store.node_beat(node, ready=2, slots=4, backends=["local"])
    store.node_drain("c", True)
    assert sorted(n for _, n in store.admit(100, 60)) == ["a", "a", "b", "b"]
    store.node_drain("c", False)
    assert store.admit(100, 0) == [], "nobody beat within the time-out"
    assert [n for _, n in store.admit(100, 60)] == ["c", "c"]


def test_waiting_sessions_of_a_dead_node_start_again(store):
    (sid,) = admitted(store)
    (waiting,) = store.waiting_on("a")
    assert store.fail(waiting, LINE, ERROR, retry=True, delay=100, mode="waiting") == "retry"
    assert store.session(sid).state == "PENDING" and store.backlog()["delayed"] == 1
    assert store.admit(100, 60) == [], "the backoff isn't over"


@pytest.mark.parametrize("stage", ["PENDING", "ADMITTED", "READY"])
def test_cancel_while_waiting_goes_to_postrun(store, stage):
    if stage == "PENDING":
        (sid,) = store.submit(task(), "local")
    else:
        (sid,) = admitted(store)
    if stage == "READY":
        store.advance(store.begin(sid, "init", "a", "w", 60), "READY", sandbox=b"")
    assert store.cancel(sid) == stage
    s = store.begin(sid, "postrun", "a", "w", 60)
    assert s.termination == "cancelled"
    assert store.admit(100, 60) == [] and store.begin(sid, "init", "a", "w", 60) is None
    assert store.nodes().get("a", {"ready": 0})["ready"] == 0


def test_cancel_while_worked_on_is_told_by_the_lease(store):
    (sid,) = admitted(store)
    s = store.begin(sid, "init", "a", "w", 60)
    assert store.cancel(sid) == "INITIALIZING"
    assert store.renew([(sid, s.fence)], 60) == [2]
    assert store.advance(s, "READY", sandbox=b"") == "POSTRUN"
    assert store.session(sid).termination == "cancelled"


def test_group_min_k_is_published_once_and_early(store):
    group = GroupPolicy(mode="min_k", k=2)
    ids = admitted(store, n=4, group=group)
    seen = []
    for sid, reward in zip(ids, (None, 0.0, 1.0, 1.0), strict=True):
        to_postrun(store, sid)
        s = store.begin(sid, "postrun", "a", "w", 60)
        assert store.commit(s, sid, "finished", "passed", reward, LINE, group) == []
        seen.append(store.redis.xlen(store.keys.groups("results")))
    assert seen == [0, 0, 1, 1]


def test_cancel_rest_is_part_of_the_commit_and_happens_once(store):
    group = GroupPolicy(mode="min_k", k=1, cancel_rest=True)
    ids = admitted(store, n=7, ready=6, group=group)
    store.submit(task("bystander"), "local")
    first, ready, running, initializing, ending, _ = ids
    pending = "t1.s6"
    to_postrun(store, first)
    to_postrun(store, ending)
    store.advance(store.begin(ready, "init", "a", "w", 60), "READY", sandbox=b"")
    store.advance(store.begin(running, "init", "a", "w", 60), "READY", sandbox=b"")
    working = [store.begin(running, "run", "a", "w", 60), store.begin(initializing, "init", "a", "w", 60)]
    s = store.begin(first, "postrun", "a", "w", 60)
    assert store.commit(s, "k", "finished", "passed", 1.0, LINE, group) == [ready, ids[5], pending]
    assert store.renew([(w.session_id, w.fence) for w in working], 60) == [2, 2]
    assert [x.state for x in store.sessions([ready, ids[5], pending])] == ["POSTRUN"] * 3
    assert all(x.cancel for x in store.task_status("t1").sessions if x.session_id != first)
    assert not store.session(first).cancel and not store.session("bystander.s0").cancel
    assert {x.session_id for x in store.overdue_hints(-1)} >= {ready, ids[5], pending}
    for sid in (ready, ending):
        s = store.begin(sid, "postrun", "a", "w", 60)
        assert store.commit(s, sid, "cancelled", "not_evaluated", 0.5, LINE, group) == []
    assert store.redis.xlen(store.keys.groups("results")) == 1


@pytest.mark.parametrize("group", [GroupPolicy(mode="min_k", k=1), GroupPolicy(cancel_rest=True)])
def test_without_cancel_rest_or_an_early_group_nobody_is_cancelled(store, group):
    first, second = admitted(store, n=2, group=group)
    to_postrun(store, first)
    s = store.begin(first, "postrun", "a", "w", 60)
    assert store.commit(s, "k", "finished", "passed", 1.0, LINE, group) == []
    assert not store.session(second).cancel and store.session(second).state == "ADMITTED"


def test_an_attempt_has_one_line_in_the_ledger_though_cancelled_after_it_failed(store):
    (sid,) = admitted(store)
    s = store.begin(sid, "init", "a", "w", 60)
    failed = LedgerLine(session_id=sid, attempt=1, termination="infra_error", error=ERROR)
    assert store.fail(s, failed, ERROR, retry=True, delay=600, mode="worker") == "retry"
    assert store.cancel(sid) == "PENDING" and store.backlog()["delayed"] == 0
    s = store.begin(sid, "postrun", "a", "w", 60)
    line = LedgerLine(session_id=sid, attempt=s.attempt, termination="cancelled")
    store.commit(s, "k", "cancelled", "not_evaluated", None, line, STRICT)
    assert store.session(sid).termination == "cancelled" and store.ledger(sid) == [failed]


def test_capture_only_sessions_end_by_close_or_deadline(store):
    s = store.open_capture(task("open", timeout_seconds=60))
    assert (s.state, s.attempt, s.mode) == ("RUNNING", 1, "capture")
    assert store.advance(s, "POSTRUN") == "POSTRUN"
    late = store.open_capture(task("late", timeout_seconds=0.001))
    _until(lambda: store.expired())
    assert store.release(late.session_id, late.fence, mode="expired")
    assert store.begin("late.s0", "postrun", "a", "w", 60).termination == "agent_timeout"


def test_hints_of_waiting_sessions_become_overdue(store):
    (sid,) = admitted(store)
    assert [s.session_id for s in _until(lambda: store.overdue_hints(0))] == [sid]
    store.hinted_again([sid])
    assert store.overdue_hints(30) == []
    store.begin(sid, "init", "a", "w", 60)
    store.hinted_again([sid])
    assert store.overdue_hints(-30) == [], "a session in work needs no message"


STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "init", "ready", "run", "ran", "post", "commit", "fail", "expire", "cancel"]),
              st.integers(0, 3)),
    max_size=60,
)  # fmt: skip


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(STEPS)
def test_no_order_of_events_breaks_the_invariants(store, steps):
    """Any interleaving: each session is in one place, committed at most once, and can still be driven to DONE."""
    store.redis.flushall()
    ids = store.submit(task(n=4), "local")
    store.node_beat("a", ready=2, slots=4, backends=["local"])
    held: dict[str, object] = {}
    for what, i in steps:
        _step(store, ids[i], what, held)
    for sid in ids:  # whatever happened, the machinery can finish it
        held.pop(sid, None)
        for _ in range(20):
            s = store.session(sid)
            if s.state == "DONE":
                break
            store.redis.zadd(store.keys.leases, {sid: 1}, xx=True)
            _step(store, sid, "expire", held)
            for what in ("admit", "init", "ready", "run", "ran", "post", "commit"):
                _step(store, sid, what, held)
        assert store.session(sid).state == "DONE"
    results = [e[b"session"].decode() for _, e in store.redis.xrange(store.keys.results("results"))]
    assert sorted(results) == sorted(ids)
    assert store.backlog() == {"pending": 0, "delayed": 0, "postrun": 0, "open": 0}
    n = store.nodes()["a"]
    assert n["ready"] == n["running"] == 0
    assert store.redis.zcard(store.keys.leases) == store.redis.zcard(store.keys.hints) == 0


def _step(store: SessionStore, sid: str, what: str, held: dict) -> None:
    s = held.get(sid)
    try:
        if what == "admit":
            store.admit(100, 60)
        elif what in ("init", "run", "post"):
            begun = store.begin(sid, {"post": "postrun"}.get(what, what), "a", "w", 60)
            held[sid] = begun or s
        elif what == "cancel":
            store.cancel(sid)
        elif what == "expire":
            store.redis.zadd(store.keys.leases, {sid: 1}, xx=True)
            for e in store.expired():
                if store.fail(e, LINE, ERROR, retry=e.attempt < 3, delay=0, mode="expired") == "stale":
                    store.release(e.session_id, e.fence, mode="expired")
        elif s is None:
            return
        elif what == "ready":
            store.advance(s, "READY", sandbox=b"")
        elif what == "ran":
            store.advance(s, "POSTRUN")
        elif what == "fail":
            store.fail(s, LINE, ERROR, retry=s.attempt < 3, delay=0, mode="worker")
        elif what == "commit":
            store.commit(s, sid, "finished", "passed", 1.0, LINE, STRICT)
    except LeaseLost:
        pass


def test_concurrent_begins_have_one_winner(store):
    (sid,) = admitted(store)
    won = []
    threads = [threading.Thread(target=lambda: won.append(store.begin(sid, "init", "a", "w", 60))) for _ in range(16)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sum(w is not None for w in won) == 1


def _until(condition, seconds: float = 5.0):
    import time

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
    raise AssertionError("the condition never came true")


def test_tasks_that_ended_long_ago_are_forgotten(store):
    for name in ("old", "new", "open"):
        (sid,) = admitted(store, name=name, results_queue="q")
        if name != "open":
            to_postrun(store, sid)
            store.commit(store.begin(sid, "postrun", "a", "w", 60), "k", "finished", "passed", 1.0, LINE, STRICT)
            assert not store.session(sid).run_report and not store.session(sid).sandbox
        if name == "old":
            then = store.now() + 0.002  # the streams count milliseconds
            while store.now() < then:
                pass
    assert forget(store, 0) == 0 and forget(store, then) == 1
    assert store.task_ids() == ["open", "new"]
    with pytest.raises(NotFound):
        store.session("old.s0")
    assert store.ledger("old.s0") == [] and store.ledger("new.s0") != []
    for stream in (store.keys.results("q"), store.keys.groups("q")):
        assert [e.get(b"task") for _, e in store.redis.xrange(stream)] == [b"new"]
    assert not [k for k in store.redis.keys("*old*")]
    assert forget(store, store.now(), most=0) == 0
    assert forget(store, store.now()) == 1 and store.task_ids() == ["open"]
