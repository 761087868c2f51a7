"""A call is registered while its prompt is planned: whatever happens meanwhile, it costs a turn only if it is asked."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy import linking
from proxy.pausing import PauseRequest, ResumeRequest
from tests.proxy.chat_client import ask
from tests.proxy.fake_engine import Reply
from tests.proxy.test_retries import two_proxies

pytestmark = pytest.mark.timeout(60)  # what is held for ever fails soon
TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'
TOO_LONG = "word " * 5000  # more tokens than the context has, and yet not hopeless at first sight


@pytest.fixture
def held(monkeypatch):
    """Plans of requests that say "hold" wait for `go_on`; (begun, go_on)."""
    begun, go_on, plan = asyncio.Event(), asyncio.Event(), linking.plan

    async def slow(attempt, codec, request, *rest):
        if "hold" in request.messages[-1]["content"]:
            begun.set()
            await go_on.wait()
        return await plan(attempt, codec, request, *rest)

    monkeypatch.setattr(linking, "plan", slow)
    return begun, go_on


def registered(world, grant) -> tuple[int, int]:
    """(turns, calls in flight) as the store has them."""
    return world.store.usage(grant.attempt_id)[0].turns, world.redis.hlen(world.store.keys.inflight(grant.attempt_id))


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.01)


async def idle(world) -> None:
    await until(lambda: not world.server.service._running)


@pytest.mark.parametrize("how", ["client", "session"])
async def test_who_goes_while_the_prompt_is_planned_is_not_waited_for(world, held, how):
    begun, go_on = held
    capability, grant = world.mint()
    task = asyncio.create_task(ask(world, capability, text="hold"))
    await begun.wait()
    await until(lambda: registered(world, grant) == (1, 1))
    if how == "client":
        task.cancel()
    else:
        world.store.revoke(grant.attempt_id)
    await until(lambda: registered(world, grant) == (0, 0))
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    go_on.set()
    await idle(world)
    assert world.engine.served == [] and registered(world, grant) == (0, 0)
    if how == "session":
        assert (await task)[0] == 410


@pytest.mark.parametrize("error", [RuntimeError("broken"), None])
async def test_what_can_not_be_planned_costs_no_turn(world, monkeypatch, error):
    capability, grant = world.mint()

    async def fails(*_):
        raise error

    if error is not None:
        monkeypatch.setattr(linking, "plan", fails)
    status, _, _ = await ask(world, capability, text="go" if error is not None else TOO_LONG)
    assert status == (500 if error is not None else 400)
    await idle(world)
    assert registered(world, grant) == (0, 0) and world.engine.served == []


@pytest.mark.parametrize("mode", ["hold", "wait"])
async def test_a_pause_that_begins_while_the_prompt_is_planned_holds_the_call(world, held, mode):
    begun, go_on = held
    capability, grant = world.mint()
    world.engine.default = lambda _: Reply(ids=world.ids("hello"))
    task = asyncio.create_task(ask(world, capability, text="hold"))
    await begun.wait()
    pauses = world.server.service.pauses
    pausing = asyncio.create_task(pauses.pause(PauseRequest(mode=mode, timeout_seconds=20)))
    await until(lambda: not pauses.free("policy"))
    go_on.set()
    await until(lambda: pauses.state()["models"]["policy"]["held"] == 1)
    await pausing
    assert pauses.state()["models"]["policy"]["in_flight"] == 0 and world.engine.served == []
    pauses.resume(ResumeRequest())
    assert (await task)[0] == 200
    assert registered(world, grant) == (1, 0)


async def test_a_call_that_can_not_be_asked_takes_no_other_calls_last_turn(world, held):
    begun, go_on = held
    capability, grant = world.mint(max_turns=2)
    world.says("hi")
    assert (await ask(world, capability))[0] == 200
    too_long = asyncio.create_task(ask(world, capability, text="hold " + TOO_LONG))
    await begun.wait()
    await asyncio.wait({too_long}, timeout=0.1)  # time to take the turn in, if it does
    world.says("hi again")
    assert (await ask(world, capability, text="more"))[0] == 200
    go_on.set()
    assert (await too_long)[0] == 400
    await idle(world)
    assert world.store.usage(grant.attempt_id)[1] == ""  # no limit that the session ran into
    assert registered(world, grant) == (2, 0)


async def called_elsewhere(world, capability) -> list[dict]:
    """The history behind a call of the first of two proxies that the second, which serves the session, doesn't know."""
    world.says("hi")
    assert (await ask(world, capability, text="before"))[0] == 200
    world.says(CALL)
    world.servers.reverse()
    _, answer, _ = await ask(world, capability, tools=TOOLS)
    world.servers.reverse()
    message = answer["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "a b"}
    return [{"role": "user", "content": "go"}, message, result]


async def test_a_prompt_that_is_too_long_for_want_of_news_is_planned_again(bare_world):
    """The harness sends the call back at length: only who knows the call has its tokens."""
    world = bare_world
    await two_proxies(world)
    capability, grant = world.mint()
    messages = await called_elsewhere(world, capability)
    function = messages[1]["tool_calls"][0]["function"]
    function["arguments"] = json.dumps({"__unparsedToolInput": {"raw": function["arguments"], "why": TOO_LONG}})
    world.says("done")
    status, answer, _ = await ask(world, capability, messages=messages, tools=TOOLS)
    assert status == 200, answer
    assert world.stored(grant)[-1].link == "continued" and world.store.notes(grant.attempt_id) == {}


async def test_news_that_came_while_a_call_was_held_are_planned_with(bare_world):
    world = bare_world
    _, two = await two_proxies(world)
    capability, grant = world.mint()
    messages = await called_elsewhere(world, capability)
    pauses = two.service.pauses
    await pauses.pause(PauseRequest())
    world.says("done")
    task = asyncio.create_task(ask(world, capability, messages=messages, tools=TOOLS))
    await until(lambda: pauses.state()["models"]["policy"]["held"] == 1)
    # As any other call of the session does that is in flight, or recalls something.
    await two.service.store.sync(two.service.attempts.get(grant.attempt_id))
    pauses.resume(ResumeRequest())
    assert (await task)[0] == 200
    assert world.stored(grant)[-1].link == "continued"
