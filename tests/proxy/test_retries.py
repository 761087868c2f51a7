"""The same request again: joined, replayed, or sampled anew, and what is charged for it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp
import pytest

from tests.proxy.fake_engine import Reply

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
MARK = {"X-Stainless-Retry-Count": "1"}


def body(stream: bool = False, text: str = "go") -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "tools": TOOLS, "stream": stream}


@contextlib.asynccontextmanager
async def post(server, capability: str, stream: bool = False, text: str = "go", headers: dict | None = None):
    url = f"{server.url}/s/{capability}/v1/chat/completions"
    async with aiohttp.ClientSession() as http, http.post(url, json=body(stream, text), headers=headers) as response:
        yield response


async def ask(server, capability: str, **options) -> tuple[int, str]:
    """(status, text): of a stream, the text of its deltas."""
    async with post(server, capability, **options) as response:
        data = await response.read()
        if not options.get("stream") or response.status != 200:
            answer = json.loads(data)
            return response.status, answer["choices"][0]["message"]["content"] if response.status == 200 else data
        assert data.endswith(b"[DONE]\n\n")
        lines = [line[6:] for line in data.decode().split("\n\n") if line.startswith("data: {")]
        deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
        return response.status, "".join(d.get("content") or "" for d in deltas)


async def settled(server) -> None:
    """Nothing is in flight, and the store knows what was delivered."""
    async with asyncio.timeout(10):
        while server.service._running:
            await asyncio.sleep(0.01)
    await server.service.store.tell_delivered()


async def listeners(server, n: int) -> None:
    async with asyncio.timeout(10):
        while sum(g._listeners for a in server.service.attempts for g in a.generations.values()) != n:
            await asyncio.sleep(0.01)


async def lose_the_answer(world, server, capability: str, says: str, **options) -> None:
    """A finished answer whose client dies between the last token and the end of it."""
    world.says(says)
    store = server.service.store
    stored, go_on, end = asyncio.Event(), asyncio.Event(), server.service.store.end

    async def slow_end(*args):
        await end(*args)
        stored.set()
        await go_on.wait()

    store.end = slow_end
    task = asyncio.create_task(ask(server, capability, **options))
    await stored.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await listeners(server, 0)
    go_on.set()
    store.end = end
    await settled(server)


def links(world, grant) -> list[str]:
    return [c.link for c in sorted(world.stored(grant), key=lambda c: c.index)]


def turns(world, grant) -> int:
    return world.store.usage(grant.attempt_id)[0].turns


@pytest.mark.parametrize("first", [False, True])
async def test_stream_and_whole_join(world, first):
    """Claude Code falls back from a stream to a whole answer, with the body otherwise the same."""
    capability, grant = world.mint()
    reply = world.says("The quick brown fox", hold_after=2)
    one = asyncio.create_task(ask(world.server, capability, stream=first))
    await world.engine.until(lambda: world.engine.sampled == 2)
    two = asyncio.create_task(ask(world.server, capability, stream=not first))
    await listeners(world.server, 2)
    reply.release.set()
    assert (await one) == (await two) == (200, "The quick brown fox")
    assert len(world.engine.served) == 1 and links(world, grant) == ["first"] and turns(world, grant) == 1


@pytest.mark.parametrize("first", [False, True])
async def test_stream_and_whole_replay_each_other(world, first):
    capability, grant = world.mint()
    await lose_the_answer(world, world.server, capability, f"Hello. {CALL}", stream=first)
    assert await ask(world.server, capability, stream=not first) == (200, "Hello. ")
    assert len(world.engine.served) == 1 and turns(world, grant) == 1


async def test_a_joined_client_that_leaves_does_not_abort_the_other(world):
    capability, grant = world.mint()
    reply = world.says("The quick brown fox", hold_after=2)
    one = asyncio.create_task(ask(world.server, capability, stream=True))
    await world.engine.until(lambda: world.engine.sampled == 2)
    two = asyncio.create_task(ask(world.server, capability))
    await listeners(world.server, 2)
    one.cancel()
    await listeners(world.server, 1)
    reply.release.set()
    assert (await two)[1] == "The quick brown fox" and world.engine.aborts == []
    (c,) = world.stored(grant)
    assert c.finish_reason == "stop" and c.delivered


async def test_twins_on_purpose_get_one_sample(world):
    """Two subagents with equal prompts at once can't be told from a retry, as no CLI marks those: both get the same
    sample, counted once. Exact, if less diverse; what they do with it forks into chains of their own."""
    capability, grant = world.mint()
    world.engine.default = lambda b: Reply(ids=world.ids(CALL), delay=0.02)
    answers = await asyncio.gather(*(ask(world.server, capability) for _ in range(5)))
    assert len(set(answers)) == 1 and len(world.engine.served) == 1 and turns(world, grant) == 1


async def test_delivered_answers_are_sampled_again_unless_the_client_marks_a_retry(world):
    capability, grant = world.mint()
    world.says("one")
    assert (await ask(world.server, capability))[1] == "one"
    # The SDK says that it never got it, whatever our socket said.
    assert (await ask(world.server, capability, headers=MARK))[1] == "one"
    assert (await ask(world.server, capability, headers=MARK, stream=True))[1] == "one"
    world.says("two")
    assert (await ask(world.server, capability, headers={"X-Stainless-Retry-Count": "0"}))[1] == "two"
    assert (await ask(world.server, capability, headers=MARK))[1] == "two"
    assert links(world, grant) == ["first", "sibling"] and turns(world, grant) == 2


async def test_a_marked_retry_of_a_failed_call_is_sampled(world):
    """A second sample is wanted, its first try fails: the mark is not about the answer before."""
    capability, grant = world.mint()
    world.says("one")
    await ask(world.server, capability)
    world.says("two", status=400)
    assert (await ask(world.server, capability))[0] == 500
    world.says("three")
    assert (await ask(world.server, capability, headers=MARK))[1] == "three"
    assert links(world, grant) == ["first", "sibling"]


async def test_a_marked_retry_of_a_call_never_seen_is_an_ordinary_one(world):
    capability, grant = world.mint()
    world.says("one")
    assert (await ask(world.server, capability, headers=MARK))[1] == "one" and links(world, grant) == ["first"]


async def test_a_replay_costs_no_turn_and_works_at_the_limit(world):
    capability, grant = world.mint(max_turns=1)
    await lose_the_answer(world, world.server, capability, "only")
    assert (await ask(world.server, capability))[1] == "only"
    status, answer = await ask(world.server, capability)
    assert status == 403 and b"turn" in answer
    assert turns(world, grant) == 1 and world.store.usage(grant.attempt_id)[1] == "turn_limit"


async def test_an_ended_session_replays_nothing(world):
    capability, grant = world.mint()
    await lose_the_answer(world, world.server, capability, "secret")
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    assert (await ask(world.server, capability))[0] == 410 and len(world.engine.served) == 1


async def test_what_was_delivered_survives_a_restart(bare_world):
    world = bare_world
    capability, grant = world.mint()
    server = await world.serve()
    world.says("one")
    await ask(server, capability)
    await lose_the_answer(world, server, capability, "lost", text="other")
    world.servers.remove(server)
    await server.stop()
    server = await world.serve()
    assert (await ask(server, capability, text="other"))[1] == "lost"
    world.says("two")
    assert (await ask(server, capability))[1] == "two"
    assert len(world.engine.served) == 3 and turns(world, grant) == 3
    # It is known of the replayed one now, too.
    world.says("three")
    assert (await ask(server, capability, text="other"))[1] == "three"


async def test_a_proxy_that_is_killed_before_it_told_replays(bare_world):
    """The safe side: one sample."""
    world = bare_world
    capability, grant = world.mint()
    server = await world.serve()
    server.service.store.delivered = lambda *_: None  # killed within the moment before it is told
    world.says("one")
    await ask(server, capability)
    await world.serve()
    assert (await ask(world.server, capability))[1] == "one"
    assert len(world.engine.served) == 1 and turns(world, grant) == 1


async def two_proxies(world):
    one, two = await world.serve(), await world.serve()
    for server in (one, two):
        await server.service._capture.beat()  # each knows of the other
    return one, two


async def test_a_retry_at_another_proxy_after_the_answer_was_stored(bare_world):
    world = bare_world
    one, two = await two_proxies(world)
    capability, grant = world.mint()
    world.says("hi")
    assert (await ask(two, capability, text="before"))[0] == 200
    await lose_the_answer(world, one, capability, "lost")
    assert (await ask(two, capability))[1] == "lost"
    await settled(two)
    assert len(world.engine.served) == 2 and turns(world, grant) == 2
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    assert world.redis.hlen(world.store.keys.inflight(grant.attempt_id)) == 0
    await settled(one)
    world.says("again")
    assert (await ask(one, capability))[1] == "again" and links(world, grant)[-1] == "sibling"


@pytest.mark.parametrize("client_leaves", [True, False])
async def test_a_retry_at_another_proxy_while_the_first_generates(bare_world, client_leaves):
    """Each proxy draws a sample: both are stored and charged, and one of them is the other's sibling."""
    world = bare_world
    one, two = await two_proxies(world)
    capability, grant = world.mint()
    first = world.says("The quick brown fox", hold_after=2)
    task = asyncio.create_task(ask(one, capability))
    await world.engine.until(lambda: world.engine.sampled == 2)
    second = world.says("The lazy dog", hold_after=1)
    again = asyncio.create_task(ask(two, capability))
    await world.engine.until(lambda: len(world.engine.served) == 2 and world.engine.served[1].sent == 1)
    if client_leaves:
        task.cancel()
        await world.engine.until(lambda: bool(world.engine.aborts), timeout=2)
    else:
        first.release.set()
        assert (await task)[1] == "The quick brown fox"
    await world.until_stored(grant, 1)
    second.release.set()
    assert (await again)[1] == "The lazy dog"
    a, b = world.stored(grant)
    assert (a.link, b.link) == ("first", "sibling") and b.request_hash == a.request_hash
    assert sum(len(c.sampled_ids) for c in (a, b)) == world.engine.sampled and turns(world, grant) == 2
    world.check_prompts(grant)
