"""Chat Completions requests to neutral ones: what is refused, what means the same, and our own answers on their way back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from proxy import history
from proxy.dialects.base import Answer, Call
from proxy.dialects.openai_chat import OpenAIChat
from proxy.failures import CallError
from proxy.neutral import Event, Finish, Reasoning, Request, Text, ToolCall, Usage, fold
from tests.proxy.bodies import JSON, mutated

USER = {"role": "user", "content": "go"}
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {}}}}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Apply a patch."}}


def parse(body: dict[str, Any]) -> Request:
    return OpenAIChat().parse({"model": "m", "messages": [USER], **body}, Call())


def call(name: str = "run", arguments: Any = "{}", **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


RICH: dict[str, Any] = {
    "model": "m",
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be careful."}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "what?"]},
        {"role": "assistant", "content": None, "tool_calls": [call()], "reasoning_details": [{"text": "Hm."}]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c2", "type": "custom", "custom": {"name": "patch", "input": "+"}}]},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "ok"}]},
        {"role": "assistant", "content": None, "function_call": {"name": "run", "arguments": "{}"}},
        {"role": "function", "name": "run", "content": "ok"},
        {"role": "assistant", "content": None, "refusal": "No.", "tool_calls": []},
    ],
    "tools": [RUN, PATCH],
    "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function"}]}},
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}},
    "temperature": 1,
    "top_p": 0.5,
    "n": 1,
    "max_tokens": 5,
    "max_completion_tokens": 6,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "modalities": ["text"],
    "logprobs": True,
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "verbosity": "low",
}  # fmt: skip


def test_the_rich_body_is_served():
    r = parse(RICH)
    assert [m["role"] for m in r.messages] == ["system", "user", *["assistant", "tool"] * 3, "assistant"]
    assert r.messages[1]["content"].startswith("[image image/png, ") and r.messages[1]["content"].endswith("]what?")
    assert r.images == 1 and r.max_tokens == 6 and r.schema == {"type": "object"} and r.tool_choice == "auto"
    assert r.messages[2]["reasoning_content"] == "Hm."
    assert r.messages[4]["tool_calls"][0]["function"] == {"name": "patch", "arguments": '{"input": "+"}'}
    assert r.messages[7]["tool_call_id"] == r.messages[6]["tool_calls"][0]["id"]
    assert r.messages[8] == {"role": "assistant", "content": "No."}
    assert r.labels == {"ignored_fields": "logprobs,metadata,prediction"} and r.wishes["verbosity"] == "low"


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_wrong_types_are_refused_and_never_crash(data):
    body = mutated(data, RICH)
    try:
        r = OpenAIChat().parse(body, Call())
    except CallError as e:
        assert e.kind == "bad_request" and e.param and e.param in e.message
    else:
        msgspec.json.encode(r)
        assert all(isinstance(m["content"], str) for m in r.messages)


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(st.sampled_from([*RICH, "functions", "audio", "user"]), JSON, max_size=4))
def test_any_json_is_refused_or_served(body):
    try:
        parse(body)
    except CallError as e:
        assert e.kind == "bad_request" and e.param


@pytest.mark.parametrize(
    "change, field",
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {"search_context_size": "low"}}, "web_search_options"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"response_format": "json"}, "response_format"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [RUN, {"type": "custom", "custom": {"name": "run"}}]}, "tools[1]"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [RUN]}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"messages": [{"role": "assistant", "tool_calls": [3]}]}, "messages[0].tool_calls[0]"),
        ({"messages": [{"role": "assistant", "tool_calls": {}}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": 3}]}]}, "messages[0].content[0].image_url.url"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_naming_the_field(change, field):
    with pytest.raises(CallError) as e:
        parse(change)
    assert e.value.param == field and field in e.value.message


@pytest.mark.parametrize(
    "choice, neutral",
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "run"}}, "required"),
        ({"type": "custom", "custom": {"name": "patch"}}, "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, "required"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "auto"),
    ],
)
def test_tool_choices(choice, neutral):
    r = parse({"tools": [RUN, PATCH], "tool_choice": choice})
    assert r.tool_choice == neutral and r.wishes["tool_choice"] == choice and len(r.tools) == 2


@pytest.mark.parametrize("form, schema", [("text", None), ("json_object", {})])
def test_response_formats(form, schema):
    assert parse({"response_format": {"type": form}}).schema == schema


def test_the_same_call_whatever_its_transport():
    other = {"stream": True, "stream_options": {"include_usage": True}, "metadata": {"run": "1"}, "user": "me",
             "prompt_cache_key": "k", "store": True, "service_tier": "flex"}  # fmt: skip
    assert parse(other).identity == parse({}).identity != parse({"seed": 1}).identity


words = st.text(st.characters(codec="utf-8"), max_size=20)


@st.composite
def events(draw: Any) -> list[Event]:
    """A sample's events: reasoning, text and calls in pieces."""
    out: list[Event] = [Reasoning(t) for t in draw(st.lists(words.filter(bool), max_size=3))]
    out += [Text(t) for t in draw(st.lists(words.filter(bool), max_size=4))]
    names = draw(st.lists(st.sampled_from(["run", "patch"]), max_size=3))
    arguments = st.dictionaries(words | st.just("input"), JSON, max_size=2) | st.fixed_dictionaries({"input": words})
    out += [ToolCall(f"call_{i}", n, json.dumps(draw(arguments))) for i, n in enumerate(names)]
    reason = "tool_calls" if names else draw(st.sampled_from(["stop", "length"]))
    return [*out, Finish(reason=reason, usage=Usage(prompt_tokens=5, sampled_tokens=7))]


def messages(sample: list[Event]) -> tuple[dict, dict]:
    """The message of the whole answer, and what the SDK adds up from the stream."""
    request = parse({"tools": [RUN, PATCH], "stream_options": {"include_usage": True}})
    answer = Answer(id="c-1", model="m", created=0, request=request)
    whole = json.loads(OpenAIChat().whole(answer, sample))
    encoder = OpenAIChat().encoder(answer)
    raw = encoder.start() + b"".join(encoder.heartbeat() + encoder.event(e) for e in sample)
    chunks = [json.loads(c.removeprefix(b"data: ")) for c in raw.split(b"\n\n")[:-2]]
    assert raw.endswith(b"data: [DONE]\n\n") and chunks[-1]["usage"] == whole["usage"]
    state = ChatCompletionStreamState(input_tools=openai.omit, response_format=openai.omit)
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.construct(**chunk))  # as the client does it: unvalidated
    snapshot = state.current_completion_snapshot.model_dump()["choices"][0]
    assert snapshot["finish_reason"] == whole["choices"][0]["finish_reason"]
    for call in snapshot["message"]["tool_calls"] or ():  # what the SDK adds for itself
        call.pop("index", None)
        if call["function"] is None:
            del call["function"]
        else:
            del call["function"]["parsed_arguments"]
    return whole["choices"][0]["message"], snapshot["message"]


@settings(max_examples=200, deadline=None)
@given(sample=events())
def test_our_own_answer_comes_back_as_the_same_message(sample):
    ours, _ = fold(sample)
    for theirs in messages(sample):
        read = parse({"messages": [USER, theirs]}).messages[1]
        assert history.step(0, read) == history.step(0, ours)
        assert history.call_ids(read) == history.call_ids(ours)
        assert read.get("reasoning_content", "") == ours.get("reasoning_content", "")


@settings(max_examples=100, deadline=None)
@given(sample=events())
def test_the_stream_adds_up_to_the_whole_answer(sample):
    whole, streamed = messages(sample)
    for name in ("role", "reasoning_content", "tool_calls"):
        assert (whole.get(name) or None) == (streamed.get(name) or None)
    assert (whole["content"] or "") == (streamed["content"] or "")


@pytest.mark.parametrize(
    "echo",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning_details": [{"type": "reasoning.text", "text": "H"}, {"type": "reasoning.text", "text": "m."}]},
        {"reasoning": {"effort": "x"}, "reasoning_content": "Hm."},
    ],
)
def test_reasoning_in_all_its_forms(echo):
    read = parse({"messages": [USER, {"role": "assistant", "content": "Yes.", "tool_calls": [], **echo}]}).messages[1]
    assert read == {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}


def test_a_call_that_its_custom_tool_has_no_place_for_stays_a_function():
    request = parse({"tools": [PATCH]})
    answer = Answer(id="c-1", model="m", created=0, request=request)
    usage = Usage(prompt_tokens=1, sampled_tokens=1)
    forms = ['{"input": "+a"}', '{"input": 3}', '{"input": "+a", "x": 1}', "{}"]
    sample = [*(ToolCall(str(i), "patch", f) for i, f in enumerate(forms)), Finish(reason="tool_calls", usage=usage)]
    calls = json.loads(OpenAIChat().whole(answer, sample))["choices"][0]["message"]["tool_calls"]
    assert [c["type"] for c in calls] == ["custom", "function", "function", "function"]
    assert calls[0]["custom"] == {"name": "patch", "input": "+a"}
