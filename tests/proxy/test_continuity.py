"""Which completion a request continues, and what counts as the same request."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import numpy as np
import pytest

from polar.completion import resolve_prompts

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>'


class Chat:
    """A harness: keeps a history, sends it whole each time."""

    def __init__(self, world, capability: str, *messages: dict, tools: list | None = None):
        self.world, self.capability, self.messages, self.tools = world, capability, list(messages), tools

    def body(self, stream: bool = False) -> dict:
        return {"model": "m", "messages": self.messages, "stream": stream} | (
            {"tools": self.tools} if self.tools else {}
        )

    async def send(self) -> dict:
        async with (
            aiohttp.ClientSession() as http,
            http.post(f"{self.world.server.url}/s/{self.capability}/v1/chat/completions", json=self.body()) as response,
        ):
            answer = json.loads(await response.read())
            assert response.status == 200, answer
            return answer["choices"][0]["message"]

    async def says(self, text: str, **options) -> dict:
        self.world.says(text, **options)
        return await self.send()


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def result(call: dict, text: str = "ok") -> dict:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


async def begin(world, text: str = CALL, **limits):
    """A session after its first turn: (chat, its answer, grant)."""
    capability, grant = world.mint(**limits)
    chat = Chat(world, capability, {"role": "system", "content": "Be careful."}, user("List."), tools=TOOLS)
    answer = await chat.says(text)
    return chat, answer, grant


def links(world, grant) -> list[str]:
    return [c.link for c in sorted(world.stored(grant), key=lambda c: c.index)]


@pytest.mark.parametrize(
    "arguments",
    ['{"command": "ls", "n": 1.0}', '{"command":"ls","n":1}', '{ "n": 1, "command": "ls" }'],
    ids=["verbatim", "as JavaScript writes it", "reordered"],
)
async def test_reserialised_calls_still_continue(world, arguments):
    chat, answer, grant = await begin(world, f"<think>Hm.</think>Ok. {CALL}")
    (call,) = answer["tool_calls"]
    echo = {
        "role": "assistant",
        "content": "Ok.",
        "tool_calls": [{**call, "function": {"name": "run", "arguments": arguments}}],
    }
    chat.messages += [echo, result(call)]
    await chat.says("done")
    assert links(world, grant) == ["first", "continued"]
    world.check_prompts(grant)


async def test_reasoning_may_be_missing_or_trimmed_but_not_other(world):
    for theirs, link in ((None, "continued"), ("I think,", "continued"), ("I never said this", "rewritten")):
        chat, answer, grant = await begin(world, "<think>\nI think, therefore.\n</think>Yes.")
        echo = {"role": "assistant", "content": answer["content"]} | ({"reasoning_content": theirs} if theirs else {})
        chat.messages += [echo, user("And?")]
        await chat.says("done")
        assert links(world, grant)[-1] == link
        world.store.forget(grant.attempt_id)
        world.server.service.attempts.drop(grant.attempt_id)


async def test_an_edited_turn_is_rewritten(world):
    chat, _, grant = await begin(world, "I will look.")
    chat.messages += [{"role": "assistant", "content": "I will NOT look."}, user("And?")]
    await chat.says("done")
    one, two = world.stored(grant)
    assert two.link == "rewritten" and "edited" in two.link_reason
    # The common beginning is stored as a reference all the same.
    assert two.parent_id == one.completion_id and 16 <= two.prompt_shared < one.prompt_length + len(one.sampled_ids)
    world.check_prompts(grant)


async def test_edited_arguments_are_rewritten_though_the_id_is_kept(world):
    chat, answer, grant = await begin(world)
    (call,) = answer["tool_calls"]
    other = {**call, "function": {"name": "run", "arguments": '{"command": "rm"}'}}
    chat.messages += [{"role": "assistant", "content": "", "tool_calls": [other]}, result(call)]
    await chat.says("done")
    assert links(world, grant) == ["first", "rewritten"]
    world.check_prompts(grant)


async def test_compaction_and_subagents_start_chains_of_their_own(world):
    chat, answer, grant = await begin(world)
    compacted = Chat(world, chat.capability, chat.messages[0], user("Summary: listed."), tools=TOOLS)
    await compacted.says("going on")
    subagent = Chat(world, chat.capability, {"role": "system", "content": "You search."}, user("find"), tools=TOOLS * 2)
    await subagent.says("found")
    title = Chat(world, chat.capability, user("Give a title"))
    await title.says("Title")
    assert links(world, grant) == ["first", "new_chain", "new_chain", "new_chain"]
    assert [c.role for c in world.stored(grant)] == ["main", "unknown", "subagent", "auxiliary"]
    chat.messages += [answer | {"content": ""}, result(answer["tool_calls"][0])]
    await chat.says("done")
    last = world.stored(grant)[-1]
    assert last.link == "continued" and last.parent_id == world.stored(grant)[0].completion_id
    world.check_prompts(grant)


async def test_changed_tools_are_rewritten(world):
    chat, answer, grant = await begin(world, "Hello.")
    chat.messages += [answer, user("And?")]
    chat.tools = TOOLS * 2
    await chat.says("done")
    assert links(world, grant) == ["first", "rewritten"]
    assert len(world.stored(grant)[1].tools) == 2
    world.check_prompts(grant)


async def test_the_same_request_after_its_answer_is_a_sibling(world):
    chat, answer, grant = await begin(world)
    chat.messages += [answer | {"content": ""}, result(answer["tool_calls"][0])]
    one = await chat.says("first try")
    two = await chat.says("second try")
    assert (one["content"], two["content"]) == ("first try", "second try")
    a, b, c = world.stored(grant)
    assert c.link == "sibling" and c.parent_id == b.parent_id == a.completion_id
    assert resolve_prompts([a, b, c])[c.completion_id].tolist() == resolve_prompts([a, b])[b.completion_id].tolist()
    # What the agent goes on with decides the chain.
    chat.messages += [one, user("go on")]
    await chat.says("ok")
    assert world.stored(grant)[3].parent_id == b.completion_id
    world.check_prompts(grant)


async def test_equal_text_is_told_apart_by_call_ids(world):
    chat, one, grant = await begin(world)
    two = await chat.says(CALL)
    assert one["tool_calls"][0]["id"] != two["tool_calls"][0]["id"]
    a, b = world.stored(grant)
    for answer, completion in ((one, a), (two, b)):
        branch = Chat(world, chat.capability, *chat.messages, answer | {"content": ""}, tools=TOOLS)
        branch.messages.append(result(answer["tool_calls"][0], completion.completion_id))
        await branch.says("ok")
        assert world.stored(grant)[-1].parent_id == completion.completion_id


async def test_the_same_request_in_flight_joins(world):
    capability, grant = world.mint()
    chat = Chat(world, capability, user("go"))
    reply = world.says("only once", hold_after=1)
    first = asyncio.create_task(chat.send())
    await world.engine.until(lambda: world.engine.sampled == 1)
    second = asyncio.create_task(chat.send())
    async with asyncio.timeout(5):
        while not any(g._listeners == 2 for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    reply.release.set()
    assert (await first)["content"] == (await second)["content"] == "only once"
    assert len(world.engine.served) == 1 and len(world.stored(grant)) == 1


async def test_an_answer_that_never_arrived_is_replayed(world):
    """The client dies between the last token and the end of its answer."""
    capability, grant = world.mint()
    chat = Chat(world, capability, user("go"))
    world.says(f"Hello. {CALL}")
    store = world.server.service.store
    stored, go_on = asyncio.Event(), asyncio.Event()
    end = store.end

    async def slow_end(*args):
        await end(*args)
        stored.set()
        await go_on.wait()

    store.end = slow_end
    first = asyncio.create_task(chat.send())
    await stored.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(5):
        while any(g._listeners for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    go_on.set()
    store.end = end
    again = await chat.send()
    assert again["content"].startswith("Hello.") and len(world.engine.served) == 1
    assert len(world.stored(grant)) == 1 and world.store.usage(grant.attempt_id)[0].turns == 1
    # Delivered now, so the next one is a new sample.
    await chat.says("another")
    assert links(world, grant) == ["first", "sibling"]


async def test_a_second_proxy_continues_the_session(world):
    chat, answer, grant = await begin(world)
    await world.serve()
    chat.messages += [answer | {"content": ""}, result(answer["tool_calls"][0])]
    one = await chat.says("on the second")
    world.servers.reverse()
    chat.messages += [one, user("and")]
    await chat.says("on the first")
    assert links(world, grant) == ["first", "continued", "continued"]
    world.check_prompts(grant)


async def test_a_long_session_stays_one_chain_and_is_rebuilt_exactly(world):
    chat, answer, grant = await begin(world)
    for i in range(12):
        if i == 6:
            world.server.service.attempts.drop(grant.attempt_id)  # as after an eviction or a restart
        reply = answer | {"content": answer["content"] or ""}
        tail = [result(c, f"out {i}") for c in answer.get("tool_calls") or ()] or [user(f"next {i}")]
        chat.messages += [reply, *tail]
        answer = await chat.says(CALL if i % 3 else f"Step {i}.")
    assert links(world, grant) == ["first"] + ["continued"] * 12
    world.check_prompts(grant)
    stored = world.stored(grant)
    assert all(
        c.prompt_shared == stored[i].prompt_length + len(stored[i].sampled_ids) for i, c in enumerate(stored[1:])
    )
    index = world.server.service.attempts.peek(grant.attempt_id)
    for c, prompt in resolve_prompts(stored).items():
        assert np.array_equal(index.prompt(index.nodes[c]), prompt)
