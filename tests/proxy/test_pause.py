"""Pausing for a weight update: held calls, drains, leases, and who may ask for it."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from polar.errors import Conflict
from proxy.pausing import PauseRequest, Pauses, ResumeRequest
from tests.proxy.fake_engine import Reply

pytestmark = pytest.mark.timeout(60)  # what is held for ever fails soon


def body(text: str = "go", stream: bool = False) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream}


@pytest.fixture
async def world(bare_world):
    await bare_world.serve(heartbeat=0.05, admin_port=0)
    bare_world.engine.default = lambda _: Reply(ids=bare_world.ids("hello there"))
    return bare_world


async def admin(world, path: str, method: str = "POST", headers: dict | None = None, **sent) -> tuple[int, dict]:
    async with (
        aiohttp.ClientSession() as http,
        http.request(method, world.server.admin_url + path, json=sent or None, headers=headers) as response,
    ):
        return response.status, await response.json()


async def ask(world, capability: str, **more) -> tuple[int, dict]:
    url = f"{world.server.url}/s/{capability}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body(**more)) as response:
        return response.status, json.loads(await response.read())


async def until(world, **wanted) -> dict:
    """Until GET /pause says so of the model."""
    async with asyncio.timeout(10):
        while True:
            _, state = await admin(world, "/pause", "GET")
            policy = state["models"]["policy"]
            if all(policy.get(k) == v for k, v in wanted.items()):
                return policy
            await asyncio.sleep(0.01)


async def test_calls_are_held_with_heartbeats_and_go_on(world, monkeypatch):
    monkeypatch.setattr("proxy.delivery.HEADERS_WITHIN", 0.1)
    capability, grant = world.mint()
    status, state = await admin(world, "/pause", model="policy", lease_seconds=30)
    assert status == 200 and state["paused"] and 29 < state["models"]["policy"]["lease_seconds_left"] <= 30
    whole = asyncio.create_task(ask(world, capability, text="whole"))
    url = f"{world.server.url}/s/{capability}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body(stream=True)) as response:
        assert response.status == 200
        got = b""
        while got.count(b'"delta":{},') < 2:
            got += await response.content.readany()
        await until(world, held=2, in_flight=0)
        assert world.engine.served == [] and world.store.usage(grant.attempt_id)[0].turns == 0
        status, state = await admin(world, "/resume")
        assert status == 200 and not state["paused"]
        got += await response.read()
    assert b"hello" in got and got.endswith(b"[DONE]\n\n")
    assert (await whole)[0] == 200
    assert len(world.engine.served) == 2 and world.store.usage(grant.attempt_id)[0].turns == 2


async def test_a_drain_waits_for_what_is_in_flight(world):
    capability, _ = world.mint()
    reply = world.says("in flight", hold_after=1)
    first = asyncio.create_task(ask(world, capability, text="first"))
    await world.engine.until(lambda: world.engine.sampled == 1)
    pausing = asyncio.create_task(admin(world, "/pause"))
    await until(world, draining=True, in_flight=1)
    second = asyncio.create_task(ask(world, capability, text="second"))
    await until(world, held=1)
    assert not pausing.done() and len(world.engine.served) == 1
    reply.release.set()
    status, state = await pausing
    assert status == 200 and state["models"]["policy"]["in_flight"] == 0 and not state["models"]["policy"]["draining"]
    assert (await first)[0] == 200 and not second.done() and len(world.engine.served) == 1
    await admin(world, "/resume")
    assert (await second)[0] == 200


async def test_a_drain_that_fails_leaves_no_pause(world):
    capability, _ = world.mint()
    reply = world.says("slow", hold_after=1)
    first = asyncio.create_task(ask(world, capability, text="first"))
    await world.engine.until(lambda: world.engine.sampled == 1)
    pausing = asyncio.create_task(admin(world, "/pause", timeout_seconds=0.3))
    await until(world, draining=True)
    second = asyncio.create_task(ask(world, capability, text="second"))
    status, answer = await pausing
    assert status == 504 and answer["error"]["code"] == "drain_timeout"
    assert (await second)[0] == 200, "what was held went on"
    assert (await admin(world, "/pause", "GET"))[1]["paused"] is False
    reply.release.set()
    assert (await first)[0] == 200


async def test_a_trainer_that_goes_away_while_it_drains_leaves_no_pause(world):
    capability, _ = world.mint()
    reply = world.says("slow", hold_after=1)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 1)
    pausing = asyncio.create_task(admin(world, "/pause"))
    await until(world, draining=True)
    pausing.cancel()
    await until(world, paused=False)
    reply.release.set()
    assert (await first)[0] == 200


async def test_a_failed_renewal_keeps_the_pause_that_was(world):
    await admin(world, "/pause", mode="hold", lease_seconds=30)
    service = world.server.service
    flight = service.pauses.begin("policy")  # as one that the engine keeps in place
    status, _ = await admin(world, "/pause", timeout_seconds=0.1)
    assert status == 504
    kept = (await admin(world, "/pause", "GET"))[1]["models"]["policy"]
    assert kept["paused"] and kept["mode"] == "hold"
    flight.land()
    assert (await admin(world, "/pause", timeout_seconds=5))[0] == 200


async def test_a_pause_that_lost_one_of_its_models_leaves_none():
    pauses = Pauses(["a", "b"])
    flight = pauses.begin("b")
    pausing = asyncio.create_task(pauses.pause(PauseRequest(timeout_seconds=30)))
    await asyncio.sleep(0)
    assert pauses.state()["models"]["a"]["paused"]
    pauses.resume(ResumeRequest(model="a"))
    flight.land()
    with pytest.raises(Conflict):
        await pausing
    assert not pauses.state()["paused"]


async def test_the_lease_ends_it_and_can_be_renewed(world):
    capability, _ = world.mint()
    await admin(world, "/pause", lease_seconds=0.4)
    held = asyncio.create_task(ask(world, capability))
    await until(world, held=1)
    for _ in range(4):
        await asyncio.sleep(0.2)
        assert (await admin(world, "/pause", lease_seconds=0.4))[0] == 200
    assert not held.done(), "a renewed lease holds"
    assert (await held)[0] == 200
    await until(world, paused=False)
    async with aiohttp.ClientSession() as http, http.get(f"{world.server.admin_url}/metrics") as response:
        text = await response.text()
    assert "polar_proxy_pauses_expired_total 1.0" in text and 'polar_proxy_held{model="policy"} 0.0' in text


async def test_hold_lets_what_is_in_flight_go_on(world):
    """The engine aborts it for the update: it is taken up again after the pause, as one completion of two versions."""
    capability, grant = world.mint()
    ids = world.ids("The quick brown fox")
    reply = Reply(ids=ids, hold_after=3, abort_after=3)
    world.engine.replies.append(reply)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 3)
    status, state = await admin(world, "/pause", mode="hold")
    assert status == 200 and state["models"]["policy"]["in_flight"] == 1
    reply.release.set()
    await until(world, held=1)
    assert len(world.engine.served) == 1
    world.engine.version = "v2"
    world.engine.replies.append(Reply(ids=ids[3:]))
    await admin(world, "/resume")
    status, answer = await first
    assert status == 200 and answer["choices"][0]["message"]["content"] == "The quick brown fox"
    (c,) = world.stored(grant)
    assert [(v.version, v.start, v.end) for v in c.versions] == [("v1", 0, 3), ("v2", 3, len(ids))]
    assert c.sampled_ids.tolist() == ids and len(c.logprobs) == len(ids) and not c.untrainable


async def test_hold_holds_what_the_engine_ends_before_its_first_token(world):
    capability, grant = world.mint()
    reply = Reply(ids=world.ids("old"), hold_after=0, abort_after=0)
    world.engine.replies.append(reply)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 1)
    assert (await admin(world, "/pause", mode="hold"))[0] == 200
    reply.release.set()
    await until(world, held=1, in_flight=1)
    assert len(world.engine.served) == 1
    world.engine.version = "v2"
    await admin(world, "/resume")
    assert (await first)[0] == 200
    (c,) = world.stored(grant)
    assert [v.version for v in c.versions] == ["v2"] and not c.untrainable
    assert len(world.engine.served) == 2 and world.store.usage(grant.attempt_id)[0].turns == 1


async def test_a_drain_does_not_wait_for_itself(world):
    """What is interrupted while it drains goes on: it is what the drain waits for."""
    capability, _ = world.mint()
    ids = world.ids("The quick brown fox")
    reply = Reply(ids=ids, hold_after=3, abort_after=3)
    world.engine.replies.append(reply)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 3)
    pausing = asyncio.create_task(admin(world, "/pause", timeout_seconds=10))
    await until(world, draining=True)
    world.engine.replies.append(Reply(ids=ids[3:]))
    reply.release.set()
    assert (await pausing)[0] == 200 and (await first)[0] == 200


async def test_a_held_call_whose_client_or_session_goes_is_dropped(world):
    capability, grant = world.mint()
    other, other_grant = world.mint("t.s1")
    await admin(world, "/pause")
    gone = asyncio.create_task(ask(world, capability))
    ended = asyncio.create_task(ask(world, other))
    await until(world, held=2)
    gone.cancel()
    await until(world, held=1)
    world.store.revoke(other_grant.attempt_id)
    assert (await ended)[0] == 410
    await until(world, held=0)
    assert (await ask(world, other, text="more"))[0] == 410, "an ended session doesn't wait"
    await admin(world, "/resume")
    assert world.engine.served == [] and world.stored(grant) == []
    assert world.store.usage(grant.attempt_id)[0].turns == 0
    assert world.redis.hlen(world.store.keys.inflight(grant.attempt_id)) == 0


async def test_a_late_resume_does_not_end_anothers_pause(world):
    _, first = await admin(world, "/pause")
    mine = first["models"]["policy"]["pause_id"]
    await admin(world, "/resume", pause_id=mine)
    _, second = await admin(world, "/pause")
    assert second["models"]["policy"]["pause_id"] != mine
    assert (await admin(world, "/resume", pause_id=mine, model="policy"))[0] == 409
    assert (await admin(world, "/resume", pause_id=mine))[1]["paused"] is True
    assert (await admin(world, "/resume"))[1]["paused"] is False
    assert (await admin(world, "/resume"))[0] == 200, "twice is once"


@pytest.mark.parametrize(
    "sent, words",
    [
        ({"model": "nobody"}, ["model", "nobody", "policy"]),
        ({"mode": "stop"}, ["mode", "stop"]),
        ({"lease_seconds": 0}, ["lease_seconds", "0"]),
        ({"timeout_seconds": 1e9}, ["timeout_seconds"]),
        ({"lease": 3}, ["lease"]),
    ],
)
async def test_wrong_requests(world, sent, words):
    status, answer = await admin(world, "/pause", **sent)
    assert status == 400 and all(w in answer["error"]["message"] for w in words)
    assert (await admin(world, "/pause", "GET"))[1]["paused"] is False


async def test_replays_and_counts_are_not_held(world):
    """They ask no engine."""
    capability, _ = world.mint()
    assert (await ask(world, capability))[0] == 200
    await admin(world, "/pause")
    async with aiohttp.ClientSession() as http, http.get(f"{world.server.url}/s/{capability}/v1/models") as response:
        assert response.status == 200
    status, answer = await asyncio.wait_for(ask(world, capability, text="x" * 9000), 5)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


async def test_the_secret(bare_world, monkeypatch):
    monkeypatch.setenv("POLAR_API_TOKEN", "s3cret")
    await bare_world.serve(admin_port=0)
    for headers in (None, {"Authorization": "Bearer nope"}, {"Authorization": "s3cret"}):
        for path, method in (("/pause", "POST"), ("/resume", "POST"), ("/pause", "GET")):
            assert (await admin(bare_world, path, method, headers))[0] == 401
    assert (await admin(bare_world, "/health", "GET"))[0] == 200
    assert (await admin(bare_world, "/pause", headers={"Authorization": "Bearer s3cret"}))[0] == 200


async def test_without_a_secret_only_loopback_may(bare_world, monkeypatch):
    monkeypatch.delenv("POLAR_API_TOKEN", raising=False)
    await bare_world.serve(admin_port=0)
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert (await admin(bare_world, "/pause", headers=headers))[0] == 403
    assert (await admin(bare_world, "/pause"))[0] == 200
    server = await bare_world.serve(admin_port=0, admin_host="0.0.0.0")
    server.admin_url = server.admin_url.replace("0.0.0.0", "127.0.0.1")
    status, answer = await admin(bare_world, "/pause")
    assert status == 403 and "POLAR_API_TOKEN" in answer["error"]["message"]
    assert (await admin(bare_world, "/health", "GET"))[0] == 200


async def test_stopping_ends_a_pause(bare_world):
    server = await bare_world.serve(admin_port=0)
    capability, _ = bare_world.mint()
    await admin(bare_world, "/pause")
    held = asyncio.create_task(ask(bare_world, capability))
    await until(bare_world, held=1)
    bare_world.servers.remove(server)
    await asyncio.wait_for(server.stop(), 10)
    assert (await held)[0] == 503 and bare_world.engine.served == []
