"""Killed, late, doubled, gone: what happens to the tokens then."""

from __future__ import annotations

import asyncio
import contextlib
import time

import aiohttp
import pytest

from proxy.attempt import Attempt
from tests.proxy.chat_client import ask, post, read_until
from tests.proxy.fake_engine import Reply


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_and_its_tokens_are_kept(world, stream):
    capability, grant = world.mint()
    world.says("The quick brown fox jumps over the lazy dog", hold_after=3)
    async with post(world, capability, stream=stream) if stream else contextlib.nullcontext() as response:
        if response is None:
            task = asyncio.create_task(ask(world, capability))
            await world.engine.until(lambda: world.engine.sampled == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await read_until(response, "The")
        gone = time.monotonic()
    await world.engine.until(lambda: bool(world.engine.aborts), timeout=2)
    assert time.monotonic() - gone < 1.0
    (c,) = await world.until_stored(grant, 1)
    assert c.finish_reason == "abort" and not c.delivered and not c.untrainable
    assert c.sampled_ids.tolist() == world.ids("The quick brown fox jumps over")[:3]
    assert len(c.sampled_ids) == world.engine.sampled == 3 and len(c.logprobs) == 3
    # The harness asks again: an aborted answer is not one to replay.
    world.says("whole")
    status, answer, _ = await ask(world, capability)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "whole"
    assert [c.link for c in world.stored(grant)] == ["first", "sibling"]


async def test_gone_before_the_first_token_costs_no_turn(world):
    capability, grant = world.mint()
    world.says("never", hold_after=0)
    task = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.engine.until(lambda: world.engine.served[0].finished)
    async with asyncio.timeout(5):
        while world.redis.hlen(world.store.keys.inflight(grant.attempt_id)):
            await asyncio.sleep(0.01)
    assert world.stored(grant) == [] and world.store.usage(grant.attempt_id)[0].turns == 0


async def test_revocation_aborts_and_keeps_what_was_sampled(world):
    capability, grant = world.mint()
    world.says("The quick brown fox", hold_after=2)
    whole = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 2)
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    status, answer, _ = await whole
    assert status == 410 and answer["error"]["code"] == "session_ended"
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    (c,) = world.stored(grant)
    assert c.finish_reason == "abort" and len(c.sampled_ids) == 2


async def test_revocation_breaks_a_stream_off(world):
    capability, grant = world.mint()
    world.says("The quick brown fox", hold_after=2)
    async with post(world, capability, stream=True) as response:
        await read_until(response, "The")
        await asyncio.to_thread(world.store.revoke, grant.attempt_id)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert len(await world.until_stored(grant, 1)) == 1


async def test_heartbeats_while_nothing_comes(world):
    capability, _ = world.mint()
    reply = world.says("late", hold_after=0)
    async with post(world, capability, stream=True) as response:
        assert response.status == 200  # headers don't wait for tokens
        got = await read_until(response, '"role"')
        beat = b'"delta":{},"logprobs":null,"finish_reason":null'
        while beat not in got:
            got += await read_until(response, "data")
        reply.release.set()
        got += await response.read()
    assert got.endswith(b"data: [DONE]\n\n") and b"late" in got


async def test_stopping_stores_what_is_in_flight(bare_world):
    server = await bare_world.serve()
    capability, grant = bare_world.mint()
    bare_world.says("The quick brown fox", hold_after=2)
    task = asyncio.create_task(ask(bare_world, capability))
    await bare_world.engine.until(lambda: bare_world.engine.sampled == 2)
    bare_world.servers.remove(server)
    await server.stop()
    (c,) = bare_world.stored(grant)
    assert c.finish_reason == "abort" and len(c.sampled_ids) == 2
    status, _, headers = await task
    assert status == 503 and "Retry-After" in headers


async def test_many_sessions_at_once_lose_nothing(world):
    world.engine.default = lambda b: Reply(
        ids=world.ids("The quick brown fox jumps over the lazy dog. 🎁" * (len(b["input_ids"]) % 4 + 1)), delay=0.001
    )
    grants = [world.mint(f"t.s{i}") for i in range(20)]

    async def session(capability: str, i: int) -> None:
        for n in range(3):
            if (i + n) % 3:
                assert (await ask(world, capability, text=f"{i} {n}"))[0] == 200
            else:
                async with post(world, capability, text=f"{i} {n}", stream=True) as response:
                    await read_until(response, "quick")
                    if i % 2:
                        await response.read()

    await asyncio.gather(*(session(c, i) for i, (c, _) in enumerate(grants)))
    for _, grant in grants:
        await world.until_stored(grant, 3)
    assert sum(len(c.sampled_ids) for _, g in grants for c in world.stored(g)) == world.engine.sampled
    assert all(not c.untrainable for _, g in grants for c in world.stored(g))


async def test_a_huge_prompt_is_refused_without_rendering(world, monkeypatch):
    capability, _ = world.mint()
    served = world.server.service.table.pick("policy", "policy")
    monkeypatch.setattr(served.codec, "render", None)
    monkeypatch.setattr(Attempt, "read", None)
    called = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "[" + "0," * 100_000 + "0]"}}
    for change in ({"text": "x" * 200_000}, {"messages": [{"role": "assistant", "tool_calls": [called]}]}):
        status, answer, _ = await ask(world, capability, **change)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


async def test_a_retry_while_the_aborted_answer_is_being_stored(world):
    """The client times out at the very end and asks again before the answer is stored: it gets that answer."""
    capability, grant = world.mint()
    store = world.server.service.store
    storing, go_on, end = asyncio.Event(), asyncio.Event(), store.end

    async def slow_end(*args):
        storing.set()
        await go_on.wait()
        await end(*args)

    store.end = slow_end
    world.says("only once")
    first = asyncio.create_task(ask(world, capability))
    await storing.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(5):
        while any(g._listeners for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    second = asyncio.create_task(ask(world, capability))
    async with asyncio.timeout(5):
        while not any(g.after for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    go_on.set()
    status, answer, _ = await second
    assert status == 200 and answer["choices"][0]["message"]["content"] == "only once"
    assert len(world.engine.served) == 1 and len(world.stored(grant)) == 1


async def test_the_work_behind_calls_survives_anything(world, monkeypatch):
    """Without it, ended sessions would go on, and the proxy be taken for dead."""
    capability, grant = world.mint()
    capture = world.server.service._capture
    own, beat, failures = capture.revocations, capture.beat, []

    async def fails(*args):
        if len(failures) < 2:
            failures.append(args)
            raise RuntimeError("the transport is closed")
        return await own(*args)

    async def fails_to_beat():
        monkeypatch.setattr(capture, "beat", beat)
        raise RuntimeError("the transport is closed")

    monkeypatch.setattr(capture, "revocations", fails)
    monkeypatch.setattr(capture, "beat", fails_to_beat)
    world.store.revoke("t.other.1")  # the call that waits for it is answered, the next ones fail
    async with asyncio.timeout(20):
        while len(failures) < 2 or capture.beat is not beat:
            await asyncio.sleep(0.01)
    world.says("The quick brown fox", hold_after=1)
    task = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 1)
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    assert (await task)[0] == 410
    assert not any(t.done() for t in world.server.service._tasks)


async def test_a_retry_of_what_takes_long_to_abort_is_its_sibling(world, monkeypatch):
    monkeypatch.setattr("proxy.generation._WAIT_FOR_ABORTED", 0.01)
    capability, grant = world.mint()
    go_on, end = asyncio.Event(), world.server.service.store.end

    async def slow_end(*args):
        await go_on.wait()
        await end(*args)

    monkeypatch.setattr(world.server.service.store, "end", slow_end)
    world.says("The quick brown fox", hold_after=1)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = world.says("The lazy dog", hold_after=1)
    second = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 2)
    go_on.set()
    await world.until_stored(grant, 1)
    again.release.set()
    assert (await second)[0] == 200
    broken, whole = await world.until_stored(grant, 2)
    assert (broken.finish_reason, broken.link) == ("abort", "first") and whole.link == "sibling"
    world.check_prompts(grant)
