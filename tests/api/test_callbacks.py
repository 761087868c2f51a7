"""Callbacks: delivered over refusals, restarts and outages; bounded; never redirected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from tests.api.test_access import start, wait_for
from tests.client.pipeline import finish, task

FAST = {"tries": 4, "backoff": 0.01, "takeover": 0.5}


async def until(condition: Callable[[], object], seconds: float = 20) -> None:
    end = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < end, "the condition never came true"
        await asyncio.sleep(0.02)


def left(store) -> int:
    return store.redis.xlen(store.keys.callbacks)


def dead(store) -> list[dict]:
    return [json.loads(x) for x in store.redis.lrange(store.keys.callbacks + ":dead", 0, -1)]


def run_task(store, objects, url: str, name: str = "t1") -> None:
    for sid in store.submit(task(name, 2, callback_url=url), "local"):
        finish(store, objects, sid)


async def test_delivered_once_after_refusals(make_api, store, objects, receiver):
    receiver.answers = [503, 429, 500]
    await make_api(callback_options=FAST)
    run_task(store, objects, receiver.url)
    await until(lambda: left(store) == 0)
    (body,) = receiver.bodies
    assert (body["task_id"], body["status"], len(body["results"])) == ("t1", "completed", 2)
    assert dead(store) == []


async def test_given_up_with_the_reason(make_api, store, objects, receiver):
    await make_api(callback_options=FAST)
    for name, answers in (("moved", [307]), ("refused", [400]), ("broken", [500] * 4)):
        receiver.answers = answers
        run_task(store, objects, receiver.url, name)
        await until(lambda: left(store) == 0)
    run_task(store, objects, "http://127.0.0.1:1/nobody", "nobody")
    await until(lambda: left(store) == 0)
    reasons = {d["task"]: d["reason"] for d in dead(store)}
    assert reasons["moved"] == "the receiver answered 307" and reasons["refused"] == "the receiver answered 400"
    assert "500" in reasons["broken"] and "127.0.0.1" in reasons["nobody"]
    assert receiver.bodies == []


async def test_one_dead_receiver_holds_up_nobody(make_api, store, objects, receiver):
    await make_api(callback_options={"tries": 50, "backoff": 1.0})
    run_task(store, objects, "http://127.0.0.1:1/nobody", "stuck")
    run_task(store, objects, receiver.url, "fine")
    await until(lambda: receiver.bodies)
    assert receiver.bodies[0]["task_id"] == "fine" and left(store) == 1


async def test_a_callback_begun_by_a_dead_service_is_taken_over(make_api, store, objects, receiver):
    run_task(store, objects, receiver.url)
    store.redis.xgroup_create(store.keys.callbacks, "api", id="0", mkstream=True)
    store.redis.xreadgroup("api", "died", {store.keys.callbacks: ">"})
    await make_api(callback_options=FAST)
    await until(lambda: receiver.bodies and left(store) == 0)
    assert len(receiver.bodies) == 1


async def test_delivery_survives_kill_9_of_the_service(settings, store, objects, receiver, tmp_path):
    """It was down when the task ended, and was killed while it retried: the next one delivers."""
    run_task(store, objects, receiver.url)
    receiver.answers = [503] * 3
    for n in range(2):
        file = tmp_path / f"api{n}.url"
        child = start(settings, file)
        try:
            await asyncio.to_thread(wait_for, file, child)
            if n == 0:
                await until(lambda: len(receiver.answers) < 3)
                assert receiver.bodies == []
            else:
                # The take-over time of the default service is a minute: age what the dead one held.
                ((entry, _),) = store.redis.xrange(store.keys.callbacks)
                store.redis.xclaim(store.keys.callbacks, "api", "died", 0, [entry], idle=120_000, justid=True)
                await until(lambda: receiver.bodies and left(store) == 0)
        finally:
            child.kill()
            child.wait()
