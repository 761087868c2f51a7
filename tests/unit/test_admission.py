"""Who gets a READY place, and where: order, load, nodes that fail, back-ends that nobody has."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.errors import LeaseLost
from polar.result import ErrorInfo, LedgerLine
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, TaskRequest

ERROR = ErrorInfo(code="runtime_create_failed", message="disk full", stage="init", retryable=True)


def task(name: str, n: int = 1, **kw) -> TaskRequest:
    agent = AgentSpec(harness="shell", command="true")
    return TaskRequest(agent=agent, instruction="go", task_id=name, num_samples=n, **kw)


def beat(
    store: SessionStore, node: str, ready: int = 8, slots: int = 8, backends: tuple[str, ...] = ("local",)
) -> None:
    store.node_beat(node, ready=ready, slots=slots, backends=backends)


def init_fails(store: SessionStore, sid: str, node: str) -> None:
    s = store.begin(sid, "init", node, "w", 60)
    line = LedgerLine(session_id=sid, attempt=s.attempt)
    assert store.fail(s, line, ERROR, retry=True, delay=0, mode="worker") == "retry"


def initialized(store: SessionStore, sid: str, node: str) -> None:
    store.advance(store.begin(sid, "init", node, "w", 60), "READY", sandbox=b"")


def run_to_end(store: SessionStore, sid: str, node: str) -> None:
    """Off the node: nothing of it is left there."""
    store.advance(store.begin(sid, "run", node, "w", 60), "POSTRUN")


def rested(store: SessionStore, node: str) -> None:
    assert store.redis.hset(store.keys.node(node), "rests_until", 0) == 0, "it was resting"


def test_sessions_of_an_absent_back_end_stand_in_nobodys_way(store):
    store.submit(task("apt", 2000, priority=100), "apptainer")
    store.submit(task("loc", 2), "local")
    beat(store, "a")
    assert store.admit(100, 60) == [("loc.s0", "a"), ("loc.s1", "a")]
    assert store.backlog()["pending"] == 2000
    beat(store, "b", ready=2, backends=("apptainer",))
    assert store.admit(100, 60) == [("apt.s0", "b"), ("apt.s1", "b")]
    assert store.admit(100, 60) == []


def test_sessions_of_a_full_back_end_stand_in_nobodys_way(store):
    store.submit(task("apt", 600), "apptainer")
    store.submit(task("loc"), "local")
    beat(store, "b", ready=1, backends=("apptainer",))
    beat(store, "a")
    assert store.admit(100, 60) == [("apt.s0", "b"), ("loc.s0", "a")]


def test_an_empty_queue_is_forgotten(store):
    (sid,) = store.submit(task("t"), "odd")
    assert store.redis.smembers(store.keys.pending) == {b"odd"}
    store.cancel(sid)
    assert store.backlog()["pending"] == 0 and store.admit(100, 60) == []
    assert not store.redis.exists(store.keys.pending, store.keys.pending_of("odd"))


def test_load_is_what_a_node_carries_for_its_size(store):
    beat(store, "small", ready=16, slots=4)
    beat(store, "large", ready=64, slots=64)
    for node, carries in (("small", 4), ("large", 10)):
        store.redis.sadd(store.keys.node_running(node), *range(carries))
    store.submit(task("t", 22), "local")
    assert {n for _, n in store.admit(100, 60)} == {"large"}, "10 of 64 is less than 4 of 4"
    store.redis.delete(store.keys.node_running("small"), store.keys.node_running("large"))
    store.redis.delete(store.keys.node_ready("large"))
    store.submit(task("u", 34), "local")
    assert Counter(n for _, n in store.admit(100, 60)) == {"small": 2, "large": 32}, "as the slots are"


def test_what_waits_for_run_is_load(store):
    beat(store, "a", ready=8)
    beat(store, "b", ready=8)
    store.redis.sadd(store.keys.node_ready("a"), *range(4))
    store.submit(task("t", 4), "local")
    assert {n for _, n in store.admit(100, 60)} == {"b"}


def test_a_node_that_fails_every_init_costs_no_session_more_than_one_attempt(store):
    beat(store, "healthy")
    beat(store, "broken")
    store.redis.sadd(store.keys.node_running("healthy"), *range(7))
    sessions = [f"t{i}.s0" for i in range(30)]
    for i in range(30):
        store.submit(task(f"t{i}"), "local")
    burnt: Counter[str] = Counter()
    for _ in range(40):
        for sid, node in store.admit(100, 60):
            if node == "broken":
                init_fails(store, sid, node)
                burnt[sid] += 1
            else:
                initialized(store, sid, node)
                run_to_end(store, sid, node)
    assert all(store.session(sid).state == "POSTRUN" for sid in sessions)
    assert set(burnt.values()) == {1} and len(burnt) <= 8 + 3, "one batch, then one after each rest"


def test_a_node_that_failed_rests_longer_each_time_then_gets_one_until_one_succeeds(store):
    beat(store, "a", ready=1)
    beat(store, "b", ready=8)
    store.submit(task("t", 30), "local")
    store.redis.sadd(store.keys.node_ready("a"), "other")
    rests = []
    for n in range(9):
        got = store.admit(100, 60)
        assert {node for _, node in got} == {"b"} and len(got) == (1 if n else 8)
        for sid, node in got:
            init_fails(store, sid, node)
        rests.append(float(store.redis.hget(store.keys.node("b"), "rests_until")) - store.now())
        store.redis.hset(store.keys.node("b"), "rests_until", store.now() + 60)
        assert store.admit(100, 60) == [], "rather wait for the node that works than go to one that doesn't"
        rested(store, "b")
    assert all(0 < r <= most for r, most in zip(rests, (5, 10, 20, 40, 80, 160, 300, 300, 300), strict=True))
    assert rests[-1] > 160
    ((sid, _),) = store.admit(100, 60)
    assert store.admit(100, 60) == [], "one at a time"
    initialized(store, sid, "b")
    assert len(store.admit(100, 60)) == 7, "it works again"


def test_sessions_that_are_ready_do_not_keep_a_node_from_trying_again(store):
    beat(store, "a", ready=1)
    beat(store, "b", ready=4)
    store.redis.sadd(store.keys.node_ready("a"), "other")
    store.submit(task("t", 8), "local")
    *well, (bad, _) = store.admit(100, 60)
    for sid, node in well:
        initialized(store, sid, node)
    init_fails(store, bad, "b")
    rested(store, "b")
    assert len(well) == 3 and [n for _, n in store.admit(100, 60)] == ["b"]


def test_a_single_node_goes_on_after_failures(store):
    beat(store, "a", ready=4)
    store.submit(task("t", 8), "local")
    for _ in range(3):
        got = store.admit(100, 60)
        assert len(got) == 4
        for sid, node in got:
            init_fails(store, sid, node)


def test_a_node_without_the_back_end_is_no_alternative(store):
    beat(store, "a", ready=4)
    beat(store, "b", ready=4, backends=("docker",))
    store.submit(task("t", 4), "local")
    for sid, node in store.admit(100, 60):
        init_fails(store, sid, node)
    assert [n for _, n in store.admit(100, 60)] == ["a"] * 4


def test_a_cancelled_init_is_no_failure_of_the_node(store):
    beat(store, "a")
    (sid,) = store.submit(task("t"), "local")
    store.admit(100, 60)
    s = store.begin(sid, "init", "a", "w", 60)
    store.cancel(sid)
    assert store.fail(s, LedgerLine(session_id=sid, attempt=1), ERROR, retry=True, delay=0, mode="worker") == "postrun"
    assert store.nodes()["a"]["init_failures"] == 0


def test_what_waited_before_an_upgrade_is_admitted(store):
    """From when there was one queue for all."""
    (sid,) = store.submit(task("t"), "local")
    store.redis.rename(f"{store.keys.ns}:pending:local", f"{store.keys.ns}:pending")
    beat(store, "a")
    assert store.admit(100, 60) == [(sid, "a")]


@pytest.mark.parametrize("code", ["prepare_failed", "store_unavailable", "worker_shutdown"])
def test_what_is_not_the_nodes_fault_is_no_failure_of_the_node(store, code):
    beat(store, "a")
    beat(store, "b")
    (sid,) = store.submit(task("t"), "local")
    ((_, node),) = store.admit(100, 60)
    error = ErrorInfo(code=code, message="exit code 1", stage="init", retryable=True)
    s = store.begin(sid, "init", node, "w", 60)
    assert store.fail(s, LedgerLine(session_id=sid, attempt=1), error, retry=True, delay=0, mode="worker") == "retry"
    assert store.nodes()[node]["init_failures"] == 0


def test_a_retry_goes_to_another_node_if_one_has_a_place(store):
    beat(store, "a", ready=2)
    (sid,) = store.submit(task("t"), "local")
    store.admit(100, 60)
    initialized(store, sid, "a")
    s = store.begin(sid, "run", "a", "w", 60)
    store.fail(s, LedgerLine(session_id=sid, attempt=1), ERROR, retry=True, delay=0, mode="worker")
    beat(store, "b", ready=2)
    store.redis.sadd(store.keys.node_running("b"), *range(8))
    assert store.admit(100, 60) == [(sid, "b")], "though b carries more"
    s = store.begin(sid, "init", "b", "w", 60)
    store.fail(s, LedgerLine(session_id=sid, attempt=2), ERROR, retry=True, delay=0, mode="worker")
    store.node_drain("a", True)
    assert store.admit(100, 60) == [(sid, "b")], "no other has a place"


NODES = st.lists(
    st.tuples(st.integers(0, 6), st.integers(1, 8), st.sets(st.sampled_from(["x", "y", "z"]), min_size=1), st.booleans()),
    max_size=4,
)  # fmt: skip
WAITING = st.lists(
    st.tuples(st.sampled_from(["x", "y", "z", "absent"]), st.sampled_from([0, 1, 100]), st.integers(1, 6)), max_size=10
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(NODES, WAITING, st.integers(1, 12))
def test_admission_is_in_order_within_bounds_and_leaves_no_place_unused(store, nodes, waiting, limit):
    store.redis.flushall()
    order = {}
    for i, (backend, priority, n) in enumerate(waiting):
        for k, sid in enumerate(store.submit(task(f"t{i}", n, priority=priority), backend)):
            order[sid] = ((-priority, i, k), backend)
    for i, (ready, slots, backends, failing) in enumerate(nodes):
        beat(store, str(i), ready, slots, tuple(backends))
        if failing:
            store.redis.hset(store.keys.node(str(i)), mapping={"init_failures": 1, "rests_until": store.now() + 60})
    got = store.admit(100, 60, limit)
    assert len(got) <= limit and [order[s][0] for s, _ in got] == sorted(order[s][0] for s, _ in got)
    used = Counter(n for _, n in got)
    taken = {s for s, _ in got}
    for i, (ready, _, backends, _) in enumerate(nodes):
        assert used[str(i)] <= ready
        for sid, node in got:
            assert node != str(i) or order[sid][1] in backends
    for backend in ("x", "y", "z", "absent"):
        mine = sorted((o, s) for s, (o, b) in order.items() if b == backend)
        assert [s in taken for _, s in mine] == sorted((s in taken for _, s in mine), reverse=True), (
            "the first go first"
        )
        offering = [i for i, n in enumerate(nodes) if backend in n[2]]
        sound = [i for i in offering if not nodes[i][3]]
        assert not sound or not any(nodes[int(n)][3] for s, n in got if order[s][1] == backend), (
            "a resting node was taken"
        )
        open_to = [i for i in sound or offering if used[str(i)] < nodes[i][0]]
        if len(got) < limit and any(s not in taken for _, s in mine):
            assert not open_to, "a place is free, and somebody waits for it"
    assert store.backlog()["pending"] == len(order) - len(got)


def test_no_failover_makes_two_fences_the_same(store):
    """The server forgets its latest writes: whoever had the session then holds nothing, whatever comes next."""
    beat(store, "a")
    (sid,) = store.submit(task("t"), "local")
    store.admit(100, 60)
    before = {k: store.redis.dump(k) for k in store.redis.keys("*")}
    old = store.begin(sid, "init", "a", "w1", 60)
    for k in store.redis.keys("*"):
        store.redis.delete(k)
    for k, dump in before.items():
        store.redis.restore(k, 0, dump)
    new = store.begin(sid, "init", "a", "w2", 60)
    assert store.renew([(sid, old.fence), (sid, new.fence)], 60) == [0, 1]
    try:
        store.advance(old, "READY", sandbox=b"")
        raise AssertionError("the first worker's fence is still good")
    except LeaseLost:
        assert store.advance(new, "READY", sandbox=b"") == "READY"


def test_fences_keep_all_their_digits_and_only_grow(store):
    beat(store, "a")
    (sid,) = store.submit(task("t"), "local")
    ahead = int(store.now() * 1e6) + 3_600_000_000  # of a server whose clock was an hour ahead
    store.redis.hset(store.keys.session(sid), "fence", ahead)
    store.admit(100, 60)
    s = store.begin(sid, "init", "a", "w", 60)
    assert s.fence == ahead + 1 and store.renew([(sid, s.fence)], 60) == [1]
    store.fail(s, LedgerLine(session_id=sid, attempt=1), ERROR, retry=True, delay=0, mode="worker")
    assert store.redis.hget(store.keys.session(sid), "fence") == str(ahead + 2).encode()
    capture = store.open_capture(task("c", timeout_seconds=60))
    assert abs(capture.fence - store.now() * 1e6) < 60e6 and store.renew([("c.s0", capture.fence)], 60) == [1]
