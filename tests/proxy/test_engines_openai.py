"""Servers that render and parse by themselves: answered through the same events, captured without what they don't tell."""

from __future__ import annotations

import asyncio
import itertools
import json

import aiohttp
import msgspec
import openai
import pytest

from polar.completion import resolve_prompts
from proxy.engines.openai import OpenAI
from proxy.failures import CallError
from proxy.neutral import Reasoning, Text, ToolCall
from tests.proxy.engine_orders import place
from tests.proxy.fake_engine import logprob
from tests.proxy.fake_servers import Asked, Raw, RawServer, chat_chunks, serving, sse

TOOL = {"type": "function", "function": {"name": "run", "description": "", "parameters": {"type": "object"}}}
TALK = [{"reasoning_content": "Hm, "}, {"reasoning_content": "yes."}, {"content": "The dog "}, {"content": "sleeps."}]


def call(index: int, name: str | None = None, arguments: str = "", **more) -> dict:
    return {"tool_calls": [{"index": index, "function": {"name": name, "arguments": arguments}, **more}]}


async def ask(*chunks, status: int = 200, **order):
    async with serving(lambda _: Raw(sse(*chunks), status=status)) as server:
        client = OpenAI(f"{server.url}/v1", 4096, window=0.05, model="gpt")
        try:
            placed = place(messages=[{"role": "user", "content": "hi", "refs": ["c-0"]}], **order)
            return await client.generate(placed.order), placed, server
        finally:
            await client.close()


async def test_text_and_reasoning():
    sample, placed, server = await ask(*chat_chunks(TALK))
    texts = [e.text for e in placed.events if isinstance(e, (Text, Reasoning))]
    assert "".join(texts) == "Hm, yes.The dog sleeps."
    assert sample.message == {"role": "assistant", "content": "The dog sleeps.", "reasoning_content": "Hm, yes."}
    assert (sample.ids, sample.logprobs, sample.prompt) == ([], [], None)
    assert sample.untrainable == "token_ids_missing" and sample.end == "stop"
    assert (sample.prompt_tokens, sample.sampled_tokens) == (3, 7)
    (asked,) = server.asked
    assert asked.path == "/v1/chat/completions" and asked.body["model"] == "gpt" and asked.body["max_tokens"] == 100
    assert asked.body["messages"] == [{"role": "user", "content": "hi"}] and "tools" not in asked.body


async def test_half_an_emoji_can_be_sent_and_stored():
    """Servers in JavaScript cut text where they like."""
    sample, placed, _ = await ask(*chat_chunks([{"content": "a \ud83d"}, {"content": "b"}]))
    assert sample.end == "stop" and sample.message == {"role": "assistant", "content": "a \ufffdb"}
    assert msgspec.json.encode(placed.events) and msgspec.msgpack.encode(sample.message)


async def test_calls_are_put_together():
    deltas = [
        {"content": "I run it."},
        call(0, "run", "", id="call_a"),
        call(0, None, '{"command": '),
        call(0, None, '"ls"}'),
        call(1, "run", '{"command": "pwd"}', id="call_b"),
        call(2, "run", '{"command": '),
    ]
    sample, placed, server = await ask(*chat_chunks(deltas, end="tool_calls"), tools=[TOOL])
    calls = [e for e in placed.events if isinstance(e, ToolCall)]
    assert calls == [
        ToolCall("call_a", "run", '{"command": "ls"}'),
        ToolCall("call_b", "run", '{"command": "pwd"}'),
    ], "what isn't JSON is no call"
    assert '{"command": ' in sample.message["content"] and len(sample.message["tool_calls"]) == 2
    assert server.asked[0].body["tools"] == [TOOL] and server.asked[0].body["tool_choice"] == "auto"


async def test_ids_are_taken_if_all_of_them_fit():
    ids = [[50], [51], [52, 53], [54]]
    sample, _, _ = await ask(*chat_chunks(TALK, ids=ids))
    flat = [50, 51, 52, 53, 54]
    assert sample.ids == flat and sample.prompt == [1, 2, 3] and not sample.untrainable
    assert sample.logprobs == [logprob(i, t) for i, t in enumerate(flat)]


def no_prompt(chunks: list) -> None:
    del chunks[0]["prompt_token_ids"]


def one_missing(chunks: list) -> None:
    chunks[2]["choices"][0]["token_ids"] = []


def not_named(chunks: list) -> None:
    chunks[2]["choices"][0]["logprobs"]["content"][0]["token"] = "yes"


def no_logprobs(chunks: list) -> None:
    for c in chunks[1:-1]:
        c["choices"][0]["logprobs"] = None


@pytest.mark.parametrize(
    "spoil, reason, kept",
    [
        (no_prompt, "token_ids_missing", False),
        (one_missing, "token_ids_missing", False),
        (not_named, "logprob_mismatch", True),
        (no_logprobs, "logprobs_missing", True),
    ],
)
async def test_ids_that_do_not_fit_are_left_out(spoil, reason, kept):
    chunks = chat_chunks(TALK, ids=[[50], [51], [52, 53], [54]])
    spoil(chunks)
    sample, _, _ = await ask(*chunks)
    assert sample.untrainable == reason and bool(sample.ids) == kept and sample.logprobs == []
    assert sample.message["content"] == "The dog sleeps."


async def test_a_forced_call_is_not_the_policys_own():
    chunks = chat_chunks([call(0, "run", "{}")], end="tool_calls", ids=[[50]])
    sample, _, _ = await ask(*chunks, tools=[TOOL], tool_choice="required")
    assert sample.untrainable == "constrained"


@pytest.mark.parametrize("status", [400, 422])
async def test_unknown_fields_are_left_out_and_remembered(status):
    def answer(asked: Asked) -> Raw:
        if "return_token_ids" in asked.body:
            return Raw(b'{"error": {"message": "Unrecognized request argument"}}', status=status)
        return Raw(sse(*chat_chunks(TALK)))

    async with serving(answer) as server:
        client = OpenAI(server.url, 4096, model="gpt")
        try:
            for n in range(2):
                sample = await client.generate(place(rid=f"c-{n}").order)
                assert sample.end == "stop" and sample.untrainable == "token_ids_missing"
        finally:
            await client.close()
    assert ["return_token_ids" in a.body for a in server.asked] == [True, False, False]


@pytest.mark.parametrize(
    "status, text, kind",
    [
        (400, "This model's maximum context length is 8 tokens", "context_overflow"),
        (400, "messages[0].content: too silly", "bad_request"),
        (401, "wrong key", "internal"),
        (404, "no such model", "internal"),
        (500, "oh", "unavailable"),
        (429, "slow down", "unavailable"),
    ],
)
async def test_refusals(status, text, kind):
    body = json.dumps({"error": {"message": text}}).encode()
    async with serving(lambda _: Raw(body, status=status)) as server:
        client = OpenAI(server.url, 4096, window=0.05)
        try:
            with pytest.raises(CallError) as e:
                await client.generate(place().order)
        finally:
            await client.close()
    assert e.value.kind == kind
    if kind == "bad_request":
        assert "too silly" in e.value.message and len(server.asked) == 2
        assert not client.servers[0]._plain, "a bad request says nothing about the server"


async def test_a_cancelled_call_closes_the_connection():
    def answer(_: Asked) -> Raw:
        return Raw(sse(*chat_chunks(TALK, end=None), done=False), hold=asyncio.Event())

    async with serving(answer) as server:
        client = OpenAI(server.url, 4096)
        try:
            placed = place()
            placed.order.events = lambda _: placed.order.cancel.set()
            async with asyncio.timeout(5):
                sample = await client.generate(placed.order)
                while not server.gone:
                    await asyncio.sleep(0.01)
            assert sample.end == "abort" and sample.message["content"] == "The dog sleeps."
        finally:
            await client.close()


# Through the proxy ---------------------------------------------------------------------------------------------------


class Talker:
    """A server that tells ids or not, and renders in a way of its own."""

    def __init__(self, world, tells: bool):
        self.world, self.tells = world, tells
        self.says: list[str] = []
        self.prompts: list[list[int]] = []

    def __call__(self, asked: Asked) -> Raw:
        text = self.says.pop(0)
        ids = self.world.ids(text, end=False)
        prompt = self.world.ids(
            "".join(f"<{m['role']}>{m['content']}" for m in asked.body["messages"]) + "<assistant>", False
        )
        self.prompts.append(prompt)
        deltas = [{"content": text[:3]}, {"content": text[3:]}]
        chunks = chat_chunks(deltas, ids=[ids[:1], ids[1:]] if self.tells else None)
        if self.tells:
            chunks[0]["prompt_token_ids"] = prompt
        return Raw(sse(*chunks))


async def talk(world, tells: bool, server: RawServer, talker: Talker):
    row = msgspec.structs.replace(world.settings.models["policy"], engine=server.url, protocol="openai")
    world.settings = msgspec.structs.replace(world.settings, models={"policy": row})
    await world.serve()
    capability, grant = world.mint()
    api = openai.AsyncOpenAI(base_url=f"{world.server.url}/s/{capability}/v1", api_key="x", max_retries=0)
    messages: list = [{"role": "user", "content": "Look."}]
    talker.says = ["The quick brown fox", "It sleeps.", "Done."]
    for n, text in enumerate(list(talker.says)):
        if n % 2:
            stream = await api.chat.completions.create(
                model="m", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            got, usage = "", None
            async for chunk in stream:
                usage = chunk.usage or usage
                got += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        else:
            answer = await api.chat.completions.create(model="m", messages=messages)
            got, usage = answer.choices[0].message.content, answer.usage
        assert got == text and usage.prompt_tokens > 0 and usage.completion_tokens > 0
        messages += [{"role": "assistant", "content": got}, {"role": "user", "content": f"More {n}."}]
    await api.close()
    return world.stored(grant)


async def test_a_session_without_ids(bare_world):
    talker = Talker(bare_world, False)
    async with serving(talker) as server:
        completions = await talk(bare_world, False, server, talker)
    assert [c.untrainable for c in completions] == ["token_ids_missing"] * 3
    assert all(len(c.sampled_ids) == len(c.logprobs) == c.prompt_length == 0 for c in completions), "nothing is guessed"
    assert [c.response["content"] for c in completions] == ["The quick brown fox", "It sleeps.", "Done."]
    assert [c.link for c in completions] == ["first", "rewritten", "rewritten"]
    assert [c.engine for c in completions] == ["openai"] * 3


async def test_a_session_with_ids(bare_world):
    talker = Talker(bare_world, True)
    async with serving(talker) as server:
        completions = await talk(bare_world, True, server, talker)
    assert all(not c.untrainable and len(c.logprobs) == len(c.sampled_ids) > 0 for c in completions)
    prompts = resolve_prompts(completions)
    assert [prompts[c.completion_id].tolist() for c in completions] == talker.prompts
    for before, c in itertools.pairwise(completions):
        full = talker.prompts[before.index] + before.sampled_ids.tolist()
        really = talker.prompts[c.index][: len(full)] == full
        assert c.link == ("continued" if really else "rewritten")


async def test_a_broken_answer_is_kept_and_reset(bare_world):
    answer = sse(*chat_chunks(TALK, end=None), done=False)
    async with serving(lambda _: Raw(answer, ending="reset")) as server:
        row = msgspec.structs.replace(bare_world.settings.models["policy"], engine=server.url, protocol="openai")
        bare_world.settings = msgspec.structs.replace(bare_world.settings, models={"policy": row})
        await bare_world.serve()
        capability, grant = bare_world.mint()
        url = f"{bare_world.server.url}/s/{capability}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        async with aiohttp.ClientSession() as http, http.post(url, json=body) as response:
            with pytest.raises(aiohttp.ClientError):
                await response.read()
        (c,) = await bare_world.until_stored(grant, 1)
        assert c.finish_reason == "error" and c.response["content"] == "The dog sleeps." and not len(c.sampled_ids)
