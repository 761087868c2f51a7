"""The clocks of hosts may differ: what is compared between them is the store's time."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from polar.store.capture import AsyncCapture, CaptureStore, Grant
from polar.store.connection import connect_async
from polar.store.keys import Keys
from proxy.failures import CallError
from proxy.store import Store

HOUR = 3600.0


@pytest.fixture(params=[HOUR, -HOUR], ids=["ahead", "behind"])
def skewed(request, monkeypatch) -> float:
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + request.param)
    return request.param


def grant(capture: CaptureStore, seconds: float) -> Grant:
    return Grant(session_id="s", attempt=1, task_id="t", model="m", expires_at=capture.now() + seconds)


def test_a_living_proxy_is_waited_for_whatever_the_clocks_say(store, redis_url, monkeypatch):
    capture = CaptureStore(store.redis, Keys("t"))

    async def beat() -> None:
        client = connect_async(redis_url)
        await AsyncCapture(client, capture.keys, "p").beat()
        await client.aclose()

    asyncio.run(beat())
    flight = capture.keys.inflight("s.a1")
    store.redis.hset(flight, "c", "p|0")
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + HOUR)
    stored = threading.Timer(0.3, lambda: store.redis.delete(flight))
    stored.start()
    assert capture.drain("s.a1", 60) == 0
    stored.join()


def test_a_dead_proxy_is_not_though_the_worker_is_behind(store, monkeypatch):
    capture = CaptureStore(store.redis, Keys("t"))
    store.redis.hset(capture.keys.proxies, "p", capture.now() - 11)
    store.redis.hset(capture.keys.inflight("s.a1"), "c", "p|0")
    real, begun = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() - HOUR)
    assert capture.drain("s.a1", 600) == 1 and time.monotonic() - begun < 300


def test_a_grant_lasts_as_long_as_the_store_says(store, redis_url, skewed):
    capture = CaptureStore(store.redis, Keys("t"))
    lasting, over = (capture.mint(grant(capture, seconds)) for seconds in (60, -1))
    assert all(0 < store.redis.ttl(k) <= HOUR + 60 for k in store.redis.keys("t:cap*"))

    async def ask() -> None:
        client = connect_async(redis_url)
        proxy = AsyncCapture(client, capture.keys, "p")
        await proxy.beat()
        assert abs(proxy.now() - capture.now()) < HOUR / 2
        calls = Store(proxy)
        assert (await calls.grant(lasting)).session_id == "s"
        with pytest.raises(CallError, match="time is over"):
            await calls.grant(over)
        await client.aclose()

    asyncio.run(ask())
