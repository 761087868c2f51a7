"""Anthropic's official client against the proxy: whole and streamed answers, tools, thinking, stops, errors, models."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import anthropic
import pytest

from proxy.dialects.anthropic_signature import unseal

TOOL = {
    "name": "run",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls é 📄"}}\n</tool_call>'


def client(world, capability: str, **options) -> Any:
    return anthropic.AsyncAnthropic(
        base_url=f"{world.server.url}/s/{capability}", api_key="x", **{"max_retries": 0, **options}
    )


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


async def ask(world, capability: str, stream: bool = False, **params) -> Any:
    """The final message, however it is brought."""
    params = {"model": "m", "max_tokens": 400, "messages": [user("go")], **params}
    api = client(world, capability)
    if not stream:
        return await api.messages.create(**params)
    async with api.messages.stream(**params) as s:
        return await s.get_final_message()


async def post(world, capability: str, body: Any, path: str = "/v1/messages", **headers: str) -> tuple[int, Any, Any]:
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.server.url}/s/{capability}{path}", json=body, headers=headers) as response,
    ):
        return response.status, json.loads(await response.read()), response.headers


async def test_an_answer_is_captured_completely(world):
    capability, grant = world.mint()
    world.says("The dog sleeps.")
    wishes = {"temperature": 0.2, "top_k": 3}
    answer = await ask(world, capability, model="anything", max_tokens=50, system="Be brief.", extra_body=wishes)
    assert [b.to_dict() for b in answer.content] == [{"type": "text", "text": "The dog sleeps."}]
    assert (answer.stop_reason, answer.stop_sequence, answer.model) == ("end_turn", None, "anything")
    (c,) = world.stored(grant)
    assert c.dialect == "anthropic" and c.link == "first" and c.sampled_ids.tolist() == world.ids("The dog sleeps.")
    assert c.sampling["max_new_tokens"] == 50 and c.sampling["temperature"] == 1.0
    assert c.requested_sampling == {"temperature": 0.2, "top_k": 3, "max_tokens": 50}
    assert c.messages == [{"role": "system", "content": "Be brief."}, user("go")]
    # The scripted engine says that 3 tokens of every prompt were cached; here they are no input tokens.
    usage = answer.usage
    assert usage.input_tokens + 3 == c.prompt_length and usage.cache_read_input_tokens == 3
    assert usage.output_tokens == len(c.sampled_ids)
    world.check_prompts(grant)


SAMPLES = {
    "text": "Grüße 📄👩‍👩‍👧 ok.",
    "nothing": "",
    "reasoning": "<think>\nI  thïnk 🤔.\n</think>\n\nDone.",
    "reasoning only": "<think>Only this.</think>",
    "a call": CALL,
    "all": f"<think>Look.</think>I look.\n{CALL}",
    "two calls": f"Both.\n{CALL}\n{CALL}",
    "a call, then words": f"First.\n{CALL}\nAnd then?",
    "a broken call": 'Hm. <tool_call>\n{"name": "run", "arguments": {\n</tool_call>',
    "a call without arguments": '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>',
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
async def test_a_stream_adds_up_to_the_whole_answer(world, sample):
    capability, grant = world.mint()
    answers = []
    for stream in (True, False, True):
        world.says(sample)
        answers.append(await ask(world, capability, stream, tools=[TOOL], messages=[user(f"take {len(answers)}")]))
    flat = [a.to_dict() for a in answers]
    for a, c in zip(flat, world.stored(grant), strict=True):
        assert a.pop("id") == f"msg_{c.completion_id}"
        calls = [b for b in a["content"] if b["type"] == "tool_use"]
        for b in a["content"]:
            if b["type"] == "thinking":
                assert unseal(b.pop("signature")) == c.completion_id
            if b["type"] == "tool_use":
                assert b.pop("id")
        assert "".join(b["text"] for b in a["content"] if b["type"] == "text") == c.response["content"]
        assert "".join(b["thinking"] for b in a["content"] if b["type"] == "thinking") == c.response.get(
            "reasoning_content", ""
        )
        assert [b["input"] for b in calls] == [
            json.loads(t["function"]["arguments"]) for t in c.response.get("tool_calls", ())
        ]
        assert a["stop_reason"] == ("tool_use" if calls else "end_turn")
        a["usage"].pop("input_tokens")
    assert flat[0] == flat[1] == flat[2]


async def test_the_events_of_a_stream_come_in_order(world):
    capability, _ = world.mint()
    world.says(f"<think>Look.</think>I look.\n{CALL}\n{CALL}")
    seen: list[Any] = []
    async with client(world, capability).messages.stream(
        model="m", max_tokens=400, messages=[user("go")], tools=[TOOL]
    ) as s:
        async for event in s._raw_stream:  # the bare events of the wire
            seen.append(event)
        assert s.response.headers["request-id"]
    names = [e.type for e in seen if e.type != "content_block_delta"]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert names[1:-2] == ["content_block_start", "content_block_stop"] * 4
    assert [e.content_block.type for e in seen if e.type == "content_block_start"] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    assert [e.index for e in seen if e.type == "content_block_start"] == [0, 1, 2, 3]
    deltas = [(e.index, e.delta.type) for e in seen if e.type == "content_block_delta"]
    assert deltas == sorted(deltas, key=lambda d: d[0])
    assert [t for i, t in deltas if i == 0][-1] == "signature_delta"
    assert seen[0].message.usage.input_tokens > 0 and seen[0].message.stop_reason is None
    ids = [e.content_block.id for e in seen if e.type == "content_block_start" and e.content_block.type == "tool_use"]
    assert len(set(ids)) == 2


async def test_pings_come_while_nothing_else_does(world):
    capability, _ = world.mint()
    reply = world.says("<think>One two three four five.</think>Six.", hold_after=4)
    kinds: list[str] = []
    body = {"model": "m", "max_tokens": 99, "messages": [user("go")], "stream": True}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.server.url}/s/{capability}/v1/messages?beta=true", json=body) as response,
    ):
        assert response.headers["Content-Type"].startswith("text/event-stream")
        async for line in response.content:
            if line.startswith(b"event: "):
                kinds.append(line[7:].strip().decode())
                if kinds.count("ping") == 2:
                    reply.release.set()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop" and kinds.count("ping") >= 2
    assert kinds.index("ping") > kinds.index("content_block_start"), "a ping inside a block"


async def test_pings_do_not_disturb_the_client(world):
    capability, _ = world.mint()
    world.says(f"<think>One two three.</think>Six.\n{CALL}", delay=0.25)
    answer = await ask(world, capability, True, tools=[TOOL])
    assert [b.type for b in answer.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences_are_named(world, stream):
    capability, grant = world.mint()
    world.says("one two END th", end=False, matched="END")
    answer = await ask(world, capability, stream, stop_sequences=["END", "STOP"])
    assert answer.content[0].text == "one two "
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert world.engine.served[0].body["sampling_params"]["stop"] == ["END", "STOP"]
    assert world.stored(grant)[0].stop_matched == "END"


@pytest.mark.parametrize("stream", [False, True])
async def test_length_stops_say_which_length(world, stream):
    capability, _ = world.mint()
    world.says("The quick brown fox jumps over", end=False)
    answer = await ask(world, capability, stream, max_tokens=4)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 4
    words = "word " * 4500
    prompt = len(world.codec._tokenizer.encode(words, add_special_tokens=False))
    fits = words[: len(words) * 4050 // prompt]
    world.says("The quick brown fox jumps over it " * 20, end=False)
    answer = await ask(world, capability, stream, messages=[user(fits)])
    assert answer.stop_reason == "model_context_window_exceeded"


async def test_tool_choice_none_answers_calls_as_text(world):
    capability, _ = world.mint()
    world.says(CALL)
    answer = await ask(world, capability, tools=[TOOL], tool_choice={"type": "none"})
    assert [b.type for b in answer.content] == ["text"] and answer.content[0].text == CALL


@pytest.mark.parametrize("kind", [{"type": "any"}, {"type": "tool", "name": "run"}, {"type": "auto"}])
async def test_tool_choice_is_recorded(world, kind):
    capability, grant = world.mint()
    world.says(CALL)
    choice = {**kind, "disable_parallel_tool_use": True}
    answer = await ask(world, capability, tools=[TOOL], tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    assert world.stored(grant)[0].requested_sampling["tool_choice"] == choice


async def test_tokens_are_counted_as_they_would_be_sampled_from(world):
    capability, grant = world.mint()
    world.says("ok")
    params = {"model": "m", "messages": [user("How long is this?")], "system": "Be brief.", "tools": [TOOL]}
    counted = await client(world, capability).messages.count_tokens(**params)
    await ask(world, capability, **params)
    (c,) = world.stored(grant)
    assert counted.input_tokens == c.prompt_length and world.store.usage(grant.attempt_id)[0].turns == 1


async def test_models_are_told_apart_by_the_version_header(world):
    capability, _ = world.mint()
    api = client(world, capability)
    models = [m async for m in api.models.list()]
    assert [(m.id, m.max_input_tokens, m.lifecycle) for m in models] == [("policy", 4096, "active")]
    assert (await api.models.retrieve("claude-x")).display_name == "claude-x"
    async with aiohttp.ClientSession() as http, http.get(f"{world.server.url}/s/{capability}/v1/models") as response:
        assert json.loads(await response.read())["object"] == "list"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_sdks_tool_runner_goes_on_without_a_thread(world, stream):
    @anthropic.beta_async_tool
    async def run(command: str) -> str:
        """Run a command."""
        return f"ran {command}"

    capability, grant = world.mint()
    world.says(CALL)
    world.says("done")
    runner = client(world, capability).beta.messages.tool_runner(
        model="m", max_tokens=400, messages=[user("go")], tools=[run], stream=stream
    )
    final = await runner.until_done()
    assert final.content[0].text == "done"
    one, two = world.stored(grant)
    assert two.link == "continued" and two.parent_id == one.completion_id
    assert two.messages[0]["content"] == "ran ls é 📄"


@pytest.mark.parametrize("path", ["/messages", "/v1/messages", "/v1/messages?beta=true"])
async def test_paths(world, path):
    capability, _ = world.mint()
    world.says("ok")
    status, answer, _ = await post(world, capability, {"model": "m", "max_tokens": 9, "messages": [user("go")]}, path)
    assert status == 200 and answer["content"] == [{"type": "text", "text": "ok"}]


async def test_the_key_may_be_the_capability(world):
    capability, grant = world.mint()
    for options in ({"api_key": capability}, {"api_key": None, "auth_token": capability}):
        world.says("ok")
        api = anthropic.AsyncAnthropic(base_url=world.server.url, max_retries=0, **options)
        await api.messages.create(model="m", max_tokens=9, messages=[user(str(options))])
    assert len(world.stored(grant)) == 2


async def test_a_schema_is_taken_over(world):
    from proxy.dialects.anthropic import Anthropic
    from proxy.dialects.base import Call

    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for extra in (
        {"output_config": {"format": {"type": "json_schema", "schema": schema}, "effort": "low"}},
        {"output_format": {"type": "json_schema", "schema": schema}},
    ):
        request = Anthropic().parse({"model": "m", "max_tokens": 9, "messages": [user("go")], **extra}, Call())
        assert request.schema == schema
        assert request.wishes.get("reasoning_effort") == extra.get("output_config", {}).get("effort")


# Errors -----------------------------------------------------------------------------------------------------------------


def inner(error: anthropic.APIStatusError) -> dict:
    body: Any = error.body
    assert body["type"] == "error" and "request_id" in body
    return body["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_reads_as_claude_code_knows_it(world, stream):
    capability, _ = world.mint()
    with pytest.raises(anthropic.BadRequestError) as e:
        await ask(world, capability, stream, messages=[user("word " * 5000)])
    error = inner(e.value)
    assert error["type"] == "invalid_request_error"
    words = error["message"].split()
    assert words[:4] == ["prompt", "is", "too", "long:"] and words[5:] == ["tokens", ">", "4096", "maximum"]
    assert int(words[4]) > 4096
    assert error["details"]["error_code"] == "context_length_exceeded" and world.engine.served == []


@pytest.mark.parametrize("stream", [False, True])
async def test_what_may_pass_asks_for_a_retry(world, stream):
    capability, _ = world.mint()
    world.server.service.draining = True
    status, body, headers = await post(
        world, capability, {"model": "m", "max_tokens": 9, "messages": [user("go")], "stream": stream}
    )
    assert status == 503 and headers["Retry-After"] and "x-should-retry" not in headers
    assert body["error"]["type"] == "api_error" and body["error"]["details"]["error_code"]


async def test_used_up_turns_stop_claude_code_at_once(world):
    capability, _ = world.mint(max_turns=1)
    world.says("ok")
    await ask(world, capability)
    with pytest.raises(anthropic.PermissionDeniedError) as e:
        await ask(world, capability, messages=[user("again")])
    assert inner(e.value)["type"] == "permission_error" and inner(e.value)["details"]["error_code"] == "turn_limit"
    assert e.value.response.headers["x-should-retry"] == "false"


async def test_strangers_and_ended_sessions_are_refused(world):
    capability, grant = world.mint()
    with pytest.raises(anthropic.AuthenticationError) as e:
        await ask(world, "nobody")
    assert inner(e.value)["type"] == "authentication_error" and e.value.response.headers["x-should-retry"] == "false"
    world.store.revoke(grant.attempt_id)
    with pytest.raises(anthropic.APIStatusError) as gone:
        await ask(world, capability)
    assert gone.value.status_code == 410 and inner(gone.value)["details"]["error_code"] == "session_ended"
    assert world.engine.served == []


async def test_wrong_methods_and_bodies_have_the_envelope(world):
    capability, _ = world.mint()
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{world.server.url}/s/{capability}/v1/messages") as response:
            body = json.loads(await response.read())
            assert response.status == 405 and body["type"] == "error"
        async with http.post(f"{world.server.url}/s/{capability}/v1/messages", data=b"{") as response:
            body = json.loads(await response.read())
            assert response.status == 400 and body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change, field",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [user("a"), {"role": "assistant", "content": "{"}]}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"messages": [user([{"type": "hologram"}])]}, "messages[0].content[0].type"),
        ({"messages": [user([{"type": "text", "text": 3}])]}, "messages[0].content[0].text"),
        ({"messages": [user([{"type": "image", "source": {"type": "tape"}}])]}, "messages[0].content[0].source.type"),
        ({"messages": [user([{"type": "tool_result", "content": "x"}])]}, "messages[0].content[0].tool_use_id"),
        ({"system": 3}, "system"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_sequences": ["x" * 501]}, "stop_sequences"),
        ({"tools": [{"type": "computer_20250124", "name": "computer"}]}, "tools[0].type"),
        ({"tools": [{"type": "teleport_20300101", "name": "t"}]}, "tools[0].type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{"name": "f", "input_schema": {"maximum": 10**30}}]}, "tools"),
        ({"tool_choice": {"type": "tool", "name": "nope"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"output_config": {"format": {"type": "yaml"}}}, "output_config.format.type"),
        ({"thread": {"type": "create"}}, "thread"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
)
async def test_what_cannot_be_served_is_refused_naming_the_field(world, change, field):
    capability, grant = world.mint()
    body = {"model": "m", "max_tokens": 50, "messages": [user("go")], **change}
    status, answer, _ = await post(world, capability, body)
    assert status == 400 and answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["details"]["param"] == field and field in answer["error"]["message"]
    assert world.stored(grant) == [] and world.engine.served == []
