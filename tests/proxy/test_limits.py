"""How a session's limits end it: what each dialect's client is told, and what the stage makes of it."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import aiohttp
import pytest

from polar.errors import InfraError
from polar.launch import Outcome
from proxy.dialects import DIALECTS
from tests.proxy.fake_engine import Reply
from tests.proxy.roundtrip_clients import CLIENTS
from workers.run import _judge_end

PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic": "/v1/messages",
    "openai_responses": "/v1/responses",
    "google": "/v1beta/models/m:generateContent",
}
NAMES = [d.name for d in DIALECTS if d.name in PATHS]


async def ask(world, capability: str, name: str, text: str = "go") -> tuple[int, dict, dict]:
    client = CLIENTS[name]()
    client.ask(text)
    url = f"{world.server.url}/s/{capability}{PATHS[name]}"
    async with aiohttp.ClientSession() as http, http.post(url, json=client.body("Hi.", False)) as response:
        return response.status, json.loads(await response.read()), dict(response.headers)


def ended(world, grant, code: int = 1, uncaptured: int = 0) -> str:
    """The termination that RUN finds after the agent exited with `code`."""

    class Adapter:
        def outcome(self, exit_code, output):
            return Outcome(termination="agent_error" if exit_code else "finished", message="")

    ctx = SimpleNamespace(capture=world.store, stopping=threading.Event())
    held = SimpleNamespace(lost=threading.Event(), cancel=threading.Event())
    result = SimpleNamespace(exit_code=code, output=b"", cancelled=False, timed_out=False, seconds=1.0)
    return _judge_end(
        ctx, SimpleNamespace(attempt_id=grant.attempt_id, session_id="s"), Adapter(), result, held, uncaptured
    ).termination


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("limit, value", [("turn_limit", {"max_turns": 1}), ("token_limit", {"max_total_tokens": 5})])
async def test_a_budget_that_is_used_up(world, name, limit, value):
    capability, grant = world.mint(**value)
    world.says("hi")
    assert (await ask(world, capability, name))[0] == 200
    assert world.store.usage(grant.attempt_id)[1] == "", "the limit is reached, not run into"
    status, answer, headers = await ask(world, capability, name, "more")
    assert status in (400, 403) and "used all its" in json.dumps(answer) and headers.get("x-should-retry") == "false"
    assert len(world.engine.served) == 1 and world.store.usage(grant.attempt_id)[0].turns == 1
    for code in (0, 1):
        assert ended(world, grant, code) == limit


@pytest.mark.parametrize("name", NAMES)
async def test_a_context_that_is_too_long(world, name):
    capability, grant = world.mint()
    world.says("hi")
    assert (await ask(world, capability, name))[0] == 200
    status, answer, _ = await ask(world, capability, name, "🎁" * 4000)
    assert status in (400, 413) and ("too long" in json.dumps(answer) or "exceeds the maximum" in json.dumps(answer))
    assert len(world.engine.served) == 1 and world.store.usage(grant.attempt_id)[0].turns == 1
    assert ended(world, grant, 1) == "context_overflow" and ended(world, grant, 0) == "finished"


@pytest.mark.parametrize("name", NAMES)
async def test_an_ended_session(world, name):
    capability, grant = world.mint()
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    status, _, headers = await ask(world, capability, name)
    assert status in (401, 403, 410) and world.engine.served == [] and headers.get("x-should-retry") == "false"


async def test_what_the_agent_got_over_is_no_reason_for_its_end(world):
    """A call too long, then one that compacts; an engine that was away, then is back."""
    capability, grant = world.mint()
    world.says("hi")
    await ask(world, capability, "openai_chat")
    await ask(world, capability, "openai_chat", "🎁" * 4000)
    assert ended(world, grant) == "context_overflow"
    world.says("compacted")
    assert (await ask(world, capability, "openai_chat", "summary"))[0] == 200
    assert ended(world, grant) == "agent_error"
    world.engine.replies.append(Reply(status=400))
    assert (await ask(world, capability, "openai_chat", "x"))[0] == 500
    with pytest.raises(InfraError):
        ended(world, grant)
    world.says("back")
    assert (await ask(world, capability, "openai_chat", "x"))[0] == 200
    assert ended(world, grant) == "agent_error" and world.store.notes(grant.attempt_id) == {}


async def test_an_answer_begun_before_a_failure_does_not_hide_it(world):
    capability, grant = world.mint()
    reply = world.says("slow answer", hold_after=1)
    slow = asyncio.create_task(ask(world, capability, "openai_chat", "slow"))
    await world.engine.until(lambda: world.engine.sampled == 1)
    await ask(world, capability, "openai_chat", "🎁" * 4000)
    reply.release.set()
    assert (await slow)[0] == 200
    assert ended(world, grant) == "context_overflow"


async def test_an_agent_that_fails_with_its_proxy_is_not_to_blame(world):
    capability, grant = world.mint()
    world.says("hi")
    assert (await ask(world, capability, NAMES[0]))[0] == 200
    assert ended(world, grant, code=0, uncaptured=1) == "finished"
    with pytest.raises(InfraError, match="1 of its calls lost in a proxy") as e:
        ended(world, grant, uncaptured=1)
    assert e.value.code == "proxy_lost" and e.value.retryable
