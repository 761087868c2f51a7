"""The official client against the proxy: whole and streamed answers, tools, reasoning, errors."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls"}}\n</tool_call>'


def client(world, capability: str, **options) -> Any:
    return openai.AsyncOpenAI(base_url=f"{world.server.url}/s/{capability}/v1", api_key="x", max_retries=0, **options)


def user(text: Any) -> dict:
    return {"role": "user", "content": text}


async def test_a_whole_answer_is_captured_completely(world):
    capability, grant = world.mint()
    world.says("The dog sleeps.")
    answer = await client(world, capability).chat.completions.create(
        model="anything", messages=[user("What does the dog do?")], temperature=0.2, max_tokens=50
    )
    assert answer.choices[0].message.content == "The dog sleeps."
    assert answer.choices[0].finish_reason == "stop"
    (c,) = world.stored(grant)
    assert c.link == "first" and c.parent_id is None and c.index == 0
    assert c.sampled_ids.tolist() == world.ids("The dog sleeps.")
    assert len(c.logprobs) == len(c.sampled_ids) and not c.untrainable
    assert [(v.version, v.start, v.end) for v in c.versions] == [("v1", 0, len(c.sampled_ids))]
    assert c.sampling["temperature"] == 1.0 and c.sampling["max_new_tokens"] == 50
    assert c.requested_sampling["temperature"] == 0.2
    assert c.response == {"role": "assistant", "content": "The dog sleeps."}
    assert c.finish_reason == "stop" and c.dialect == "openai_chat" and c.model == "policy"
    assert answer.usage.prompt_tokens == c.prompt_length and answer.usage.completion_tokens == len(c.sampled_ids)
    world.check_prompts(grant)
    usage, _ = world.store.usage(grant.attempt_id)
    assert usage.turns == 1 and usage.sampled_tokens == world.engine.sampled


async def test_a_tool_loop_continues_on_raw_ids(world):
    capability, grant = world.mint()
    api = client(world, capability)
    messages = [{"role": "system", "content": "Be careful."}, user("List the files.")]
    # Odd white space in the sample: any re-tokenised rendering would differ.
    world.says(
        '<think>\nI  run it.\n</think>\n\nOk.\n<tool_call>\n{"name":  "run", "arguments": {"command": "ls"}}\n</tool_call>'
    )
    first = (await api.chat.completions.create(model="m", messages=messages, tools=[TOOL])).choices[0]
    assert first.finish_reason == "tool_calls"
    call = first.message.tool_calls[0]
    assert call.function.name == "run" and json.loads(call.function.arguments) == {"command": "ls"}
    assert first.message.reasoning_content == "I  run it."
    echo = {"role": "assistant", "content": first.message.content, "tool_calls": [call.model_dump()]}
    messages += [echo, {"role": "tool", "tool_call_id": call.id, "content": "a.txt 📄"}]
    world.says("One file.")
    second = (await api.chat.completions.create(model="m", messages=messages, tools=[TOOL])).choices[0]
    assert second.message.content == "One file."
    one, two = world.stored(grant)
    assert two.link == "continued" and two.parent_id == one.completion_id
    assert two.prompt_shared == one.prompt_length + len(one.sampled_ids)
    parent_ids = world.engine.served[0].body["input_ids"] + one.sampled_ids.tolist()
    assert world.engine.served[1].body["input_ids"][: len(parent_ids)] == parent_ids
    assert two.tools == [] and two.message_shared == 3 and [m["role"] for m in two.messages] == ["tool"]
    assert two.role == "main"
    world.check_prompts(grant)


async def test_streams_deliver_reasoning_text_calls_and_usage(world):
    capability, grant = world.mint()
    world.says(f"<think>Look first.</think>I look.\n{CALL}")
    stream = await client(world, capability).chat.completions.create(
        model="m", messages=[user("go")], tools=[TOOL], stream=True, stream_options={"include_usage": True}
    )
    chunks = [c async for c in stream]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert deltas[0].role == "assistant"
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "Look first."
    assert "".join(d.content or "" for d in deltas) == "I look.\n"
    calls = [t for d in deltas for t in d.tool_calls or []]
    assert len(calls) == 1 and calls[0].function.name == "run"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].usage.completion_tokens == len(world.stored(grant)[0].sampled_ids)
    thoughts = len(world.ids("<think>Look first.</think>", end=False))
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == thoughts


async def test_a_malformed_call_is_text(world):
    capability, _ = world.mint()
    broken = '<tool_call>\n{"name": "run", "arguments": {\n</tool_call>'
    world.says(f"Hm. {broken}")
    answer = await client(world, capability).chat.completions.create(model="m", messages=[user("go")], tools=[TOOL])
    assert answer.choices[0].message.content == f"Hm. {broken}"
    assert answer.choices[0].message.tool_calls is None and answer.choices[0].finish_reason == "stop"


async def test_tool_choice_none_answers_calls_as_text(world):
    capability, _ = world.mint()
    world.says(CALL)
    answer = await client(world, capability).chat.completions.create(
        model="m", messages=[user("go")], tools=[TOOL], tool_choice="none"
    )
    assert answer.choices[0].message.content == CALL


async def test_stop_sequences_end_the_text(world):
    capability, grant = world.mint()
    world.says("one two END th", end=False, matched="END")
    for stream in (False,):
        answer = await client(world, capability).chat.completions.create(
            model="m", messages=[user("go")], stop=["END"], stream=stream
        )
        assert answer.choices[0].message.content == "one two "
    assert world.engine.served[0].body["sampling_params"]["stop"] == ["END"]
    (c,) = world.stored(grant)
    assert c.stop_matched == "END" and c.sampled_ids.tolist() == world.ids("one two END th", end=False)


async def test_a_cut_off_turn_is_closed_before_it_goes_on(world):
    capability, grant = world.mint()
    api = client(world, capability)
    world.says("The quick brown fox jumps", end=False)
    first = (await api.chat.completions.create(model="m", messages=[user("go")], max_tokens=4)).choices[0]
    assert first.finish_reason == "length"
    world.says("done")
    await api.chat.completions.create(
        model="m", messages=[user("go"), {"role": "assistant", "content": first.message.content}, user("on")]
    )
    one, two = world.stored(grant)
    assert two.link == "continued"
    before = len(world.engine.served[0].body["input_ids"]) + len(one.sampled_ids)
    assert world.engine.served[1].body["input_ids"][before] in world.codec.stop_ids
    world.check_prompts(grant)


async def test_models_are_listed(world):
    capability, _ = world.mint()
    api = client(world, capability)
    assert [m.id async for m in api.models.list()] == ["policy"]
    assert (await api.models.retrieve("some-name")).id == "some-name"


@pytest.mark.parametrize(
    "change, field",
    [
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        (
            {"messages": [user([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}])]},
            "messages[0].content",
        ),
        ({"messages": [user([{"type": "file", "file": {"file_id": "x"}}])]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": 3}, "stop"),
        ({"stop": ["x" * 501]}, "stop"),
        ({"temperature": 10**30}, "temperature"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]}, "tools"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_cannot_be_served_is_refused_naming_the_field(world, change, field):
    capability, grant = world.mint()
    with pytest.raises(openai.BadRequestError) as e:
        await client(world, capability).chat.completions.create(**{"model": "m", "messages": [user("go")], **change})
    assert e.value.param == field and field in e.value.message
    assert world.stored(grant) == [] and world.engine.served == []


async def test_a_prompt_that_does_not_fit_is_an_overflow(world):
    capability, grant = world.mint()
    with pytest.raises(openai.BadRequestError) as e:
        await client(world, capability).chat.completions.create(model="m", messages=[user("word " * 5000)])
    assert e.value.code == "context_length_exceeded" and "maximum context length" in e.value.message
    assert world.engine.served == [] and world.store.usage(grant.attempt_id)[0].turns == 0


async def test_the_engines_own_overflow_reads_the_same(world):
    capability, grant = world.mint()
    message = "The input (9 tokens) is longer than the model's context length (4 tokens)."
    for reply in ({"status": 400, "error": {"message": message}}, {"error": {"message": message}}):
        world.says("", **reply)
        with pytest.raises(openai.BadRequestError) as e:
            await client(world, capability).chat.completions.create(model="m", messages=[user("go")])
        assert e.value.code == "context_length_exceeded"
    assert world.stored(grant) == [] and world.store.usage(grant.attempt_id)[0].turns == 0


async def test_a_custom_tool_loop_in_a_stream(world):
    capability, grant = world.mint()
    api = client(world, capability)
    patch = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch."}}
    messages: list[Any] = [user("Patch it.")]
    world.says(
        '<think>Hm.</think>\n<tool_call>\n{"name": "patch", "arguments": {"input": "+ a\\n- b 📄"}}\n</tool_call>'
    )
    world.says("done")
    answers = []
    for _ in range(2):
        stream = await api.chat.completions.create(model="m", messages=messages, tools=[patch], stream=True)
        deltas = [c.choices[0].delta async for c in stream]
        answers.append("".join(d.content or "" for d in deltas))
        calls = [t.model_dump(exclude_none=True) for d in deltas for t in d.tool_calls or []]
        for call in calls:
            assert call.pop("index") == 0 and call["custom"] == {"name": "patch", "input": "+ a\n- b 📄"}
            messages += [{"role": "assistant", "content": None, "tool_calls": [call]}]
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "ok"}]}]
    assert answers[1] == "done"
    one, two = world.stored(grant)
    assert two.link == "continued" and one.tools[0]["function"]["parameters"]["required"] == ["input"]
    world.check_prompts(grant)


async def test_images_become_placeholders(world):
    capability, grant = world.mint()
    for url in ("data:image/png;base64,AA==", "data:image/png;base64,BB==", "data:image/png;base64,AA=="):
        world.says("a box")
        part = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        await client(world, capability).chat.completions.create(
            model="m", messages=[user([part, {"type": "text", "text": "?"}])]
        )
    seen = [m["content"] for c in world.stored(grant) for m in c.messages if m["role"] == "user"]
    assert seen[0].startswith("[image image/png, ") and seen[0].endswith("]?") and seen[0] not in seen[1:2]
    assert world.stored(grant)[2].link == "sibling"  # the same image is the same text
