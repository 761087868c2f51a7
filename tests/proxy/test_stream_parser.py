"""Whatever is sampled, however it arrives: the streamed events add up to the final parse."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from polar.config import Model
from proxy.codec import Codec
from proxy.neutral import Text, ToolCall, fold
from proxy.stream_parser import StreamParser

_CALL = '<tool_call>\n{"name": "run", "arguments": {"command": "ls 🎁"}}\n</tool_call>'
_PIECES = [
    "The quick brown fox",
    " ",
    "\n\n",
    "  lazy\n",
    "🎁",
    "箱を見る",
    "é" * 3,
    "👩‍👩‍👧",
    "<",
    "<tool",
    "<|im_",
    "<thin",
    "END",
    "EN",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    _CALL,
    '<tool_call>{"name": "run", "arguments": {"n": NaN}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "run"}</tool_call>',
    '<tool_call>{"name": "run", "arguments": "x"}</tool_call>',
    '<tool_call>{"name": "run", "arguments": {',
    '<tool_call>{"name": "run", "arguments": {"a": "\\ud83d"}}</tool_call>',
    "<think>\nI think, therefore",
    "<think></think>",
    "<|im_start|>",
]


@pytest.fixture(scope="module")
def codecs(tokenizer_folder, codec) -> dict[str, Codec]:
    folder = str(tokenizer_folder)
    named = Codec("named", Model(engine="", tokenizer=folder, renderer="qwen3"))
    plain = Codec("plain", Model(engine="", tokenizer=folder))
    return {"template": codec, "qwen3": named, "no parsers": plain}


def feed(parser: StreamParser, ids: list[int], sizes: list[int]) -> tuple[list, dict]:
    events, at = [], 0
    for n in sizes:
        events += parser.feed(ids[at : at + n])
        at += n
    events += parser.feed(ids[at:])
    message, rest = parser.finish(None)
    return events + rest, message


def parser(codec: Codec, stops: list[str] | None = None, prompt: list[int] | None = None) -> StreamParser:
    return StreamParser(codec, prompt or [], [{"type": "function"}], True, stops or [], "call")


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    pieces=st.lists(st.sampled_from(_PIECES), max_size=8),
    sizes=st.lists(st.integers(1, 5), max_size=40),
    which=st.sampled_from(["template", "qwen3", "no parsers"]),
    closed=st.booleans(),
)
@example(pieces=["<think>", " I ", "</think>", "\n\n", "so", " ", "END"], sizes=[1] * 40, which="qwen3", closed=True)
# A call that seems to end the reasoning, which is then closed in the ordinary way: the call was part of it.
@example(pieces=["<think>", " I ", _CALL, " lazy\n", "</think>", "so"], sizes=[1] * 80, which="qwen3", closed=True)
def test_any_text_in_any_chunks(codecs, pieces, sizes, which, closed):
    codec = codecs[which]
    ids = codec._tokenizer.encode("".join(pieces), add_special_tokens=False)
    if closed:
        ids = [*ids, max(codec.stop_ids)]
    events, message = feed(parser(codec, ["END"]), ids, sizes)
    whole_events, whole = feed(parser(codec, ["END"]), ids, [])
    assert fold(events)[0] == message == whole == fold(whole_events)[0]


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    ids=st.lists(st.integers(0, 427), max_size=60),
    sizes=st.lists(st.integers(1, 5), max_size=60),
    which=st.sampled_from(["template", "qwen3", "no parsers"]),
)
def test_any_tokens_in_any_chunks(codecs, ids, sizes, which):
    events, message = feed(parser(codecs[which]), ids, sizes)
    assert fold(events)[0] == message


def test_characters_are_never_split(codec):
    text = "a 🎁 é 箱 👩‍👩‍👧 z"
    ids = codec._tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > len(text)  # several tokens a character
    events, _ = feed(parser(codec), ids, [1] * len(ids))
    assert all("\ufffd" not in e.text for e in events)
    assert len(events) > 3 and "".join(e.text for e in events) == text


def test_text_flows_and_calls_come_as_soon_as_they_close(codec):
    call = '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>'
    p = parser(codec)
    encode = codec._tokenizer.encode
    early = p.feed(encode("Some words that", add_special_tokens=False))
    assert fold(early)[0]["content"] == "Some words that"
    events = p.feed(encode(call, add_special_tokens=False))
    assert ToolCall("call_0", "run", "{}") in events
    assert p.feed(encode(call[:-3], add_special_tokens=False)) == []


def test_what_may_be_a_stop_sequence_waits(codec):
    p = parser(codec, ["\n\nStop"])
    encode = codec._tokenizer.encode
    assert p.feed(encode("Go on\n\nSto", add_special_tokens=False)) == [Text("Go on")]
    assert p.feed(encode("ne", add_special_tokens=False)) == [Text("\n\nStone")]


def test_reasoning_that_the_prompt_opened(codec):
    prompt = codec._tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
    p = parser(codec, prompt=prompt)
    ids = codec._tokenizer.encode("I look.\n</think>\n\nDone", add_special_tokens=False)
    events, message = feed(p, ids, [1] * len(ids))
    assert message == {"role": "assistant", "content": "\n\nDone", "reasoning_content": "I look."}
    assert fold(events)[0] == message
