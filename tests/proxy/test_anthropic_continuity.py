"""Conversations over the Messages API: what a client echoes is recognised as what was sampled."""

from __future__ import annotations

import itertools
import json
from typing import Any

import anthropic
import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st

from proxy import history
from proxy.dialects.anthropic import Anthropic
from proxy.dialects.base import Answer, Call
from proxy.neutral import Event, Finish, Message, Reasoning, Request, Text, ToolCall, Usage, fold

TOOL = {
    "name": "run",
    "description": "Run a command.",
    "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls", "n": 1.0}}\n</tool_call>'
BILLING = "x-anthropic-billing-header: cc_version=2.1.332; cc_entrypoint=sdk-cli; cch="

# Any answer ---------------------------------------------------------------------------------------------------------------

plain = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain, inner, max_size=3),
    max_leaves=6,
)
calls = st.builds(
    lambda n, name, arguments: ToolCall(f"call_{n}", name, json.dumps(arguments, ensure_ascii=False)),
    st.integers(0, 10**6),
    st.sampled_from(["run", "Read"]),
    st.dictionaries(plain, values, max_size=3),
)
answers = st.tuples(st.lists(plain.map(Reasoning), max_size=3), st.lists(plain.map(Text) | calls, max_size=5)).map(
    lambda parts: [*parts[0], *parts[1]]
)


def _answer(**more: Any) -> Answer:
    request = Request(model="m", messages=[], max_tokens=100)
    return Answer(id="c_abc", model="m", created=0, request=request, prompt_tokens=20, **more)


def _finished(events: list[Event]) -> list[Event]:
    reason = "tool_calls" if any(isinstance(e, ToolCall) for e in events) else "stop"
    return [*events, Finish(reason=reason, usage=Usage(prompt_tokens=20, sampled_tokens=7, cached_tokens=4))]  # type: ignore[arg-type]


def _streamed(events: list[Event], pings: bool) -> dict:
    """What the official client makes of the stream."""
    encoder = Anthropic().encoder(_answer())
    heartbeat = encoder.heartbeat() if pings else b""
    raw = encoder.start() + heartbeat + b"".join(encoder.event(e) + heartbeat for e in events)
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for chunk in raw.decode().split("\n\n")[:-1]:
        name, data = chunk.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        if body["type"] != "ping":
            event = anthropic._models.construct_type(type_=RawMessageStreamEvent, value=body)
            snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)  # type: ignore[arg-type]
    return snapshot.to_dict()


@given(answers, st.booleans())
def test_streams_and_whole_answers_are_the_same(events, pings):
    events = _finished(events)
    assert _streamed(events, pings) == json.loads(Anthropic().whole(_answer(), events))


def _as_javascript(value: Any) -> Any:
    """Numbers as a JavaScript client writes them."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {k: _as_javascript(v) for k, v in value.items()}
    return [_as_javascript(v) for v in value] if isinstance(value, list) else value


@given(answers, st.booleans(), st.sampled_from(["blocks", "a message each"]))
def test_an_echoed_answer_reads_as_the_sampled_one(events, javascript, form):
    response, _ = fold(events)
    content = json.loads(Anthropic().whole(_answer(), _finished(events)))["content"]
    content = _as_javascript(content) if javascript else content
    each = [[b] for b in content] if form == "a message each" and content else [content]
    messages = [{"role": "user", "content": "go"}, *({"role": "assistant", "content": c} for c in each)]
    body = {"model": "m", "max_tokens": 9, "messages": [*messages, {"role": "user", "content": "on"}]}
    (_, echoed, _) = Anthropic().parse(body, Call()).messages
    assert history.step(1, echoed) == history.step(1, response)
    assert history.call_ids(echoed) == history.call_ids(response)
    assert echoed.get("reasoning_content", "") == response.get("reasoning_content", "")
    assert echoed.get("refs", []) == (["c_abc"] if response.get("reasoning_content") else [])


@given(st.text(min_size=1))
def test_unparsed_arguments_read_as_the_sampled_ones(raw):
    response: Message = {"role": "assistant", "content": ""}
    response["tool_calls"] = [{"id": "u", "type": "function", "function": {"name": "run", "arguments": raw}}]
    block = {
        "type": "tool_use",
        "id": "u",
        "name": "run",
        "input": {"__unparsedToolInput": {"raw": raw, "len": len(raw)}},
    }
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": "b"},
    ]
    (_, echoed, _) = Anthropic().parse({"model": "m", "max_tokens": 9, "messages": turns}, Call()).messages
    assert history.step(1, echoed) == history.step(1, response)


# Whole conversations ------------------------------------------------------------------------------------------------------


class Harness:
    """Keeps a history as Claude Code does: moving cache markers, contents that are a string or a list of one block."""

    def __init__(self, world, system: str = "Be careful."):
        self.world, self.system = world, system
        self.capability, self.grant = world.mint()
        self.api = anthropic.AsyncAnthropic(
            base_url=f"{world.server.url}/s/{self.capability}", api_key="x", max_retries=0
        )
        self.messages: list[dict] = []
        self.tools: list[dict] = [TOOL]
        self.calls = 0

    async def says(self, sample: str, stream: bool = True, **options) -> list[dict]:
        self.world.says(sample, **options)
        return await self.send(stream)

    async def send(self, stream: bool = True) -> list[dict]:
        self.calls += 1
        params = {
            "model": "m",
            "max_tokens": 400,
            "system": [
                {"type": "text", "text": f"{BILLING}{self.calls}"},
                {"type": "text", "text": self.system, "cache_control": {"type": "ephemeral"}},
            ],
            "messages": self._marked(),
            "tools": self.tools,
            "metadata": {"user_id": f"call {self.calls}"},
        }
        if stream:
            async with self.api.messages.stream(**params) as s:
                answer = await s.get_final_message()
        else:
            answer = await self.api.messages.create(**params)
        content = [b.to_dict() for b in answer.content]
        self.messages.append({"role": "assistant", "content": content})
        return content

    def _marked(self) -> list[dict]:
        out = msgspec.json.decode(msgspec.json.encode(self.messages))
        for m in out:
            if m["role"] != "assistant" and isinstance(m["content"], str) and self.calls % 2:
                m["content"] = [{"type": "text", "text": m["content"]}]
        if isinstance(out[-1]["content"], list):
            out[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        return out

    def user(self, content: Any) -> None:
        self.messages.append({"role": "user", "content": content})

    def results(self, content: list[dict], *more: dict) -> None:
        """A result for every call of an answer."""
        uses = [b for b in content if b["type"] == "tool_use"]
        done = [{"type": "tool_result", "tool_use_id": b["id"], "content": f"ok {i}"} for i, b in enumerate(uses)]
        self.user([*done, *more])

    def check(self, *links: str) -> None:
        stored = sorted(self.world.stored(self.grant), key=lambda c: c.index)
        assert [c.link for c in stored] == list(links), [c.link_reason for c in stored]
        for one, two in itertools.pairwise(stored):
            if two.link == "continued":
                assert two.parent_id == one.completion_id
                assert two.prompt_shared == one.prompt_length + len(one.sampled_ids)
        self.world.check_prompts(self.grant)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_tool_loop_continues_on_raw_ids(world, stream):
    h = Harness(world)
    h.user("List the files.")
    # Odd white space in the sample: any re-tokenised rendering would differ.
    content = await h.says(f"<think>\nI  run  it.\n</think>\n\nOk.\n{CALL}\n{CALL}", stream)
    assert [b["type"] for b in content] == ["thinking", "text", "tool_use", "tool_use"]
    h.results(content, {"type": "text", "text": "<system-reminder>Hurry.</system-reminder>"})
    content = await h.says(f"{CALL}", stream)
    h.results(content)
    h.messages.append({"role": "system", "content": "Only now."})
    await h.says("<think>Fine.</think>Two files 📄.", stream)
    h.user("Thanks.")
    await h.says("Welcome.", stream)
    h.check("first", "continued", "continued", "continued")
    first = world.stored(h.grant)[0]
    assert first.messages[0] == {"role": "system", "content": "Be careful."}


@pytest.mark.parametrize("change", ["dropped", "emptied"])
async def test_thinking_may_be_lost(world, change):
    h = Harness(world)
    h.user("Go.")
    content = await h.says(f"<think>Look.</think>Ok.\n{CALL}")
    if change == "dropped":
        h.messages[-1]["content"] = [b for b in content if b["type"] != "thinking"]
    else:
        h.messages[-1]["content"][0]["thinking"] = ""
    h.results(content)
    await h.says("done")
    h.check("first", "continued")


async def test_a_found_tool_does_not_break_the_chain(world):
    h = Harness(world)
    h.tools = [TOOL, {**TOOL, "name": "ToolSearch"}]
    h.user("Find a tool.")
    content = await h.says('<tool_call>\n{"name": "ToolSearch", "arguments": {}}\n</tool_call>')
    ident = content[-1]["id"]
    found = [{"type": "tool_reference", "tool_name": "late"}]
    h.user([{"type": "tool_result", "tool_use_id": ident, "content": found}])
    h.tools = [*h.tools, {**TOOL, "name": "late", "description": "It is late.", "defer_loading": True}]
    content = await h.says('<tool_call>\n{"name": "late", "arguments": {"command": "x"}}\n</tool_call>')
    assert (content[-1]["type"], content[-1]["name"]) == ("tool_use", "late")
    h.results(content)
    await h.says("done")
    h.check("first", "continued", "continued")
    last = world.engine.served[1].body["input_ids"]
    assert "It is late." in world.codec.decode(last)


async def test_a_repeated_call_with_moved_markers_is_the_same_call(world):
    h = Harness(world)
    h.user("go")
    await h.says("one")
    h.messages.pop()
    await h.says("two", stream=False)
    h.check("first", "sibling")


async def test_an_empty_answer_goes_on(world):
    h = Harness(world)
    h.user("go")
    assert await h.says("") == []
    h.user("Well?")
    await h.says("Yes.")
    h.check("first", "continued")
