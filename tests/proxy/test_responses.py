"""The Responses dialect through the official client: whole and streamed answers, other paths, ends."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import httpx
import openai
import pydantic
import pytest

from tests.proxy.responses_client import (
    RUN,
    RUN_LS,
    call,
    client,
    dicts,
    links,
    streamed,
    streamed_raw,
    user,
    without_parsed,
)


async def test_a_whole_answer_is_captured_completely(world):
    capability, grant = world.mint()
    world.says("The dog sleeps.")
    answer = await client(world, capability).responses.create(
        model="anything",
        instructions="Be careful.",
        input="What does the dog do?",
        temperature=0.2,
        max_output_tokens=50,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        metadata={"a": "b"},
    )
    assert answer.output_text == "The dog sleeps." and answer.status == "completed" and answer.model == "anything"
    (c,) = world.stored(grant)
    assert answer.usage.input_tokens == c.prompt_length and answer.usage.output_tokens == len(c.sampled_ids)
    assert answer.usage.total_tokens == c.prompt_length + len(c.sampled_ids)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.output_tokens_details.reasoning_tokens == 0
    assert (answer.instructions, answer.metadata, answer.temperature) == ("Be careful.", {"a": "b"}, 0.2)
    assert c.messages == [
        {"role": "system", "content": "Be careful."},
        {"role": "user", "content": "What does the dog do?"},
    ]
    assert c.dialect == "openai_responses" and c.sampling["temperature"] == 1.0 and c.sampling["max_new_tokens"] == 50
    assert c.requested_sampling == {
        "temperature": 0.2,
        "max_tokens": 50,
        "reasoning_effort": "low",
        "reasoning_summary": "auto",
        "verbosity": "low",
    }


async def test_a_stream_tells_of_everything_in_order(world):
    capability, grant = world.mint()
    world.says(f"<think>\nLook first.\n</think>I look. {RUN_LS}\n{call('run', command='né')}")
    events, final = await streamed(client(world, capability), model="m", input="go", tools=[RUN])
    kinds = [e.type.removeprefix("response.") for e in events]
    once = [k for i, k in enumerate(kinds) if k != "in_progress" and (i == 0 or kinds[i - 1] != k)]
    one_call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    assert once == [
        "created",
        *(
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
        ),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        *(one_call * 2),
        "output_item.done",
        "completed",
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    reasoning, message, one, two = final.output
    assert reasoning.content[0].text == "Look first." and message.content[0].text.strip() == "I look."
    assert [json.loads(c.arguments) for c in (one, two)] == [{"command": "ls"}, {"command": "né"}]
    (c,) = world.stored(grant)
    assert all(c.completion_id[2:] in i.id for i in final.output)
    assert final.usage.output_tokens == len(c.sampled_ids) and c.finish_reason == "tool_calls"
    done = [e.item for e in events if e.type == "response.output_item.done"]
    assert [i.to_dict() for i in done] == [without_parsed(i.to_dict()) for i in final.output]


@pytest.mark.parametrize("ends", ["by itself", "broken off"])
async def test_nothing_is_run_before_the_answer_is_certain(world, ends):
    capability, grant = world.mint()
    text = f"Hm. {RUN_LS} more and more and more"
    reply = world.says(text, hold_after=len(world.ids(text)) - 3)
    kinds: list[str] = []
    broken = False
    try:
        async for e in await client(world, capability).responses.create(
            model="m", input="go", tools=[RUN], stream=True
        ):
            kinds.append(e.type)
            if e.type == "response.function_call_arguments.done":
                # The call is known and told; the answer goes on.
                assert "response.output_item.done" not in kinds
                reply.release.set() if ends == "by itself" else world.store.revoke(grant.attempt_id)
    except (openai.APIError, httpx.HTTPError):
        broken = True
    assert broken == (ends == "broken off")
    assert ("response.completed" in kinds) != broken and "response.failed" not in kinds
    assert kinds.count("response.output_item.done") == (0 if broken else 2)


async def test_a_silent_engine_is_bridged_by_events(world):
    capability, _ = world.mint()
    reply = world.says("Hello.", hold_after=0)
    stream = await client(world, capability).responses.create(model="m", input="go", stream=True)
    beats = 0
    async for e in stream:
        beats += e.type == "response.in_progress"
        if beats == 3:
            reply.release.set()
        last = e
    assert beats >= 3 and last.type == "response.completed" and last.response.output_text == "Hello."


async def test_a_cut_off_answer_is_incomplete_and_goes_on(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("The quick brown fox jumps", end=False)
    events, final = await streamed_raw(api, model="m", input=[user("go")], max_output_tokens=4)
    assert events[-1].type == "response.incomplete" and final.incomplete_details.reason == "max_output_tokens"
    assert final.output[-1].status == "incomplete" and final.status == "incomplete"
    world.says("done")
    await api.responses.create(model="m", input=[user("go"), *dicts(final), user("on")])
    assert links(world, grant) == ["first", "continued"]
    world.check_prompts(grant)


async def test_a_text_format_becomes_a_schema():
    from proxy.dialects.base import Call
    from proxy.dialects.responses import OpenAIResponses

    def schema(form: Any, *items: Any) -> Any:
        body = {"input": [user("go"), *items], "text": {"format": form}}
        return OpenAIResponses().parse(body, Call()).schema

    shape = {"type": "object", "properties": {}}
    assert schema({"type": "json_schema", "name": "x", "schema": shape, "strict": True}) == shape
    assert schema({"type": "json_object"}) == {} and schema({"type": "text"}) is None
    update = {"type": "configuration_update", "text": {"format": {"type": "json_object"}}}
    assert schema({"type": "text"}, update) == {}


async def test_tokens_are_counted_without_an_answer(world):
    capability, grant = world.mint()
    api = client(world, capability)
    counted = await api.responses.input_tokens.count(model="m", input=[user("go")], tools=[RUN])
    world.says("ok")
    answer = await api.responses.create(model="m", input=[user("go")], tools=[RUN])
    assert counted.object == "response.input_tokens" and counted.input_tokens == answer.usage.input_tokens
    assert len(world.stored(grant)) == 1


async def test_nothing_is_stored_to_be_fetched(world):
    capability, _ = world.mint()
    api = client(world, capability)
    for ask in (
        api.responses.retrieve("resp_1"),
        api.responses.delete("resp_1"),
        api.responses.cancel("resp_1"),
        api.responses.input_items.list("resp_1"),
    ):
        with pytest.raises(openai.NotFoundError) as e:
            await ask
        assert "not stored" in e.value.message


async def test_a_websocket_is_sent_to_http(world):
    capability, _ = world.mint()
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.WSServerHandshakeError) as e:
            await http.ws_connect(f"{world.server.url}/s/{capability}/v1/responses")
        assert e.value.status == 426


async def test_an_ended_session_and_a_limit_are_told_as_codex_needs_them(world):
    capability, grant = world.mint(max_turns=1)
    api = client(world, capability)
    world.says("ok")
    await api.responses.create(model="m", input="go")
    with pytest.raises(openai.BadRequestError) as e:
        await api.responses.create(model="m", input="on")
    assert e.value.code and len(world.stored(grant)) == 1
    world.server.service.draining = True
    other, _ = world.mint("t.s1")
    with pytest.raises(openai.InternalServerError) as e:
        await client(world, other).responses.create(model="m", input="go")
    assert e.value.status_code == 503 and int(e.value.response.headers["retry-after"]) > 0


async def test_a_shape_that_the_client_asks_for_is_kept_to(world):
    class Found(pydantic.BaseModel):
        inside: str

    capability, grant = world.mint()
    api = client(world, capability)
    world.says('{"inside": "a dog"}')
    answer = await api.responses.parse(model="m", input="go", text_format=Found)
    assert answer.output_parsed == Found(inside="a dog")
    (sent,) = world.engine.served
    assert json.loads(sent.body["sampling_params"]["json_schema"])["required"] == ["inside"]
    assert "constrained" in world.stored(grant)[0].untrainable
