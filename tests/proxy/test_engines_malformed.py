"""Broken answers: a typed error, an untrainable mark, or the right tokens after all. Never wrong ones, never a hang."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from polar.completion import VersionSpan
from proxy.engines.lines import Events, TooLong
from proxy.engines.openai import OpenAI
from proxy.engines.sglang import SGLang
from proxy.engines.vllm import VLLM
from proxy.failures import CallError
from proxy.neutral import Text
from tests.proxy.engine_orders import PROMPT, check, place
from tests.proxy.fake_servers import Asked, Raw, chat_chunks, serving, sglang_chunks, sse, vllm_chunks

SCRIPT = [*range(50, 58), 0]
SHORT = [50, 51, 52, 0]


def sglang(ids: list[int], **more: Any) -> list[dict]:
    return sglang_chunks(ids, **more)


def incremental(ids: list[int], **more: Any) -> list[dict]:
    return sglang_chunks(ids, incremental=True, **more)


CLIENTS = {sglang: SGLang, incremental: SGLang, vllm_chunks: VLLM}


def prompt_of(asked: Asked) -> list[int]:
    return asked.body.get("input_ids") or asked.body["token_ids"]


def rid_of(asked: Asked) -> str:
    return asked.body.get("rid") or asked.body.get("request_id", "")


@pytest.mark.parametrize("ending", ["close", "reset", "clean"])
@pytest.mark.parametrize("chunks", CLIENTS)
async def test_a_connection_that_ends_at_any_byte(chunks, ending):
    """Before the first token it is tried again, behind it taken up again: the outcome is always the whole answer."""
    whole = sse(*chunks(SHORT))

    def answer(asked: Asked) -> Raw:
        if "abort" in asked.path:
            return Raw()
        rid, rest = rid_of(asked), SHORT[len(prompt_of(asked)) - len(PROMPT) :]
        if "-" not in rid[1:]:
            return Raw(whole[: int(rid[1:])], ending=ending, chunked=ending != "clean")
        return Raw(sse(*chunks(rest)))

    async def cut(client, at: int) -> None:
        placed = place(rid=f"c{at}")
        sample = await client.generate(placed.order)
        got = sample.ids
        assert got == placed.pieces == SHORT, at
        assert sample.end == "stop" and sample.stop_matched == 0, at
        if not sample.untrainable:  # with a version that only the end would have told
            pieces = [s for s in range(len(SHORT)) if sample.logprobs[s] == -((SHORT[s]) % 31 + 1) / 32.0]
            check(placed, sample, SHORT, pieces)
            assert sample.versions in ([], [VersionSpan("v1", 0, len(SHORT))]), at
        else:
            assert sample.untrainable == "versions_unknown" and chunks is vllm_chunks, at

    async with serving(answer) as server:
        client = CLIENTS[chunks](server.url, 4096)
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(cut(client, at) for at in range(len(whole) + 1)))
        finally:
            await client.close()


@pytest.mark.parametrize("ending", ["close", "reset", "clean"])
async def test_a_chat_stream_that_ends_at_any_byte(ending):
    """Text can't be taken up again: what came is kept as a part, and nothing of it is made up."""
    deltas = [{"content": w} for w in ("The ", "quick ", "brown 🎁 ", "fox")]
    whole = sse(*chat_chunks(deltas))
    texts = ["", "The ", "The quick ", "The quick brown 🎁 ", "The quick brown 🎁 fox"]

    def answer(asked: Asked) -> Raw:
        text = asked.body["messages"][0]["content"]
        return Raw(whole[: int(text)], ending=ending, chunked=ending != "clean")

    async def cut(client, at: int) -> None:
        placed = place(rid=f"c{at}", messages=[{"role": "user", "content": str(at)}])
        try:
            sample = await client.generate(placed.order)
        except CallError as e:
            assert e.code == "engine_unavailable" and not placed.events
            return
        text = "".join(e.text for e in placed.events if isinstance(e, Text))
        assert sample.message == {"role": "assistant", "content": text} and text in texts
        assert sample.ids == [] and sample.untrainable == "token_ids_missing"
        finished = (whole[:at].find(b'"finish_reason": "stop"') >= 0 and whole[:at].endswith(b"\n")) or at > len(
            whole
        ) - 40
        assert sample.end in (("stop",) if finished else ("stop", "failed"))
        if sample.end == "stop":
            assert text == texts[-1]

    async with serving(answer) as server:
        client = OpenAI(server.url, 4096, window=0.05)
        try:
            async with asyncio.timeout(60):
                await asyncio.gather(*(cut(client, at) for at in range(len(whole) + 1)))
        finally:
            await client.close()


async def ask(chunks, body: bytes, *, vocabulary: int = 0, window: float = 0.05):
    """The sample of an engine that always answers with these bytes, and what was passed on of it."""

    def answer(asked: Asked) -> Raw:
        return Raw() if "abort" in asked.path else Raw(body)

    async with serving(answer) as server:
        client = CLIENTS[chunks](server.url, 4096, window=window)
        placed = place(vocabulary=vocabulary)
        try:
            async with asyncio.timeout(10):
                return await client.generate(placed.order), placed
        finally:
            await client.close()


def spoiled(chunks, change, at: int = 1) -> list:
    out: list = chunks(SCRIPT)
    change(out[at])
    return out


def choice(c: dict) -> dict:
    return c["choices"][0] if "choices" in c else c


def pairs(c: dict) -> list:
    return c["meta_info"]["output_token_logprobs"] if "meta_info" in c else choice(c)["logprobs"]["content"]


def ids(c: dict) -> list:
    return c["output_ids"] if "meta_info" in c else choice(c)["token_ids"]


def set_logprob(value: Any):
    def change(c: dict) -> None:
        entry = pairs(c)[-1]
        entry[0 if isinstance(entry, list) else "logprob"] = value

    return change


def other_id(c: dict) -> None:
    entry = pairs(c)[-1]
    entry[1 if isinstance(entry, list) else "token_id"] = 77


LOGPROBS = {
    "none": (lambda c: pairs(c).clear(), {"logprobs_missing", "logprob_mismatch"}),
    "one too few": (lambda c: pairs(c).pop(), {"logprob_mismatch"}),
    "one too many": (lambda c: pairs(c).append(pairs(c)[-1]), {"logprob_mismatch"}),
    "another's": (other_id, {"logprob_mismatch"}),
    "null": (set_logprob(None), {"logprob_not_finite"}),
    "NaN": (set_logprob(float("nan")), {"logprob_not_finite"}),
    "infinite": (set_logprob(float("-inf")), {"logprob_not_finite"}),
    "positive": (set_logprob(0.5), {"logprob_positive"}),
    "unknown": (set_logprob(-9999.0), {"logprob_unknown"}),
}


@pytest.mark.parametrize("name", LOGPROBS)
@pytest.mark.parametrize("chunks", CLIENTS)
async def test_bad_logprobs_cost_the_training_not_the_answer(chunks, name):
    change, reasons = LOGPROBS[name]
    body = sse(*spoiled(chunks, change, -1 if chunks is sglang else 1))
    sample, placed = await ask(chunks, body)
    assert sample.untrainable in reasons and sample.logprobs == []
    assert sample.ids == placed.pieces == SCRIPT and sample.end == "stop"


async def test_rounding_is_not_an_error():
    sample, _ = await ask(sglang, sse(*spoiled(sglang, set_logprob(1e-7), -1)))
    assert not sample.untrainable and sample.logprobs[-1] == 0.0


IDS = {
    "text": lambda c: ids(c).__setitem__(-1, "x"),
    "fraction": lambda c: ids(c).__setitem__(-1, 1.5),
    "null": lambda c: ids(c).__setitem__(-1, None),
    "negative": lambda c: ids(c).__setitem__(-1, -1),
    "huge": lambda c: ids(c).__setitem__(-1, 1 << 40),
    "no list": lambda c: choice(c).__setitem__("output_ids" if "meta_info" in c else "token_ids", 7),
}


@pytest.mark.parametrize("name", IDS)
@pytest.mark.parametrize("chunks", CLIENTS)
async def test_bad_ids_end_the_answer_where_they_come(chunks, name):
    with pytest.raises(CallError) as e:
        await ask(chunks, sse(*spoiled(chunks, IDS[name], 0)))
    assert e.value.code == "engine_protocol" and e.value.status == 503
    good = sse(*chunks(SCRIPT)[:2], done=False)
    bad = sse(*spoiled(chunks, IDS[name], 2)[2:3])
    sample, placed = await ask_in_parts(chunks, [good, bad])
    assert sample.ids == placed.pieces == SCRIPT[:4]
    assert sample.end == "failed" and sample.untrainable == "engine_protocol"


async def ask_in_parts(chunks, parts: list[bytes]):
    """As ask(), the parts in separate reads: of cumulative chunks that come together only the last is looked at."""
    release = asyncio.Event()

    async def serve(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if b"abort" in head.split(b"\r\n")[0]:
            writer.write(b"HTTP/1.1 200 X\r\nContent-Length: 0\r\n\r\n")
            return
        writer.write(b"HTTP/1.1 200 X\r\nConnection: close\r\n\r\n" + parts[0])
        await release.wait()
        writer.write(parts[1])
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = CLIENTS[chunks](f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", 4096, window=0.05)
    placed = place()
    take = placed.order.tokens

    def tokens(new: list[int]) -> None:
        take(new)
        release.set()

    placed.order.tokens = tokens
    try:
        async with asyncio.timeout(10):
            return await client.generate(placed.order), placed
    finally:
        await client.close()
        server.close()


@pytest.mark.parametrize("raw", [b"{", b'{"output_ids": [1,', b"\xff\xfe", b"null", b"[" * 100_000, b'"x"'])
@pytest.mark.parametrize("chunks", CLIENTS)
async def test_events_that_are_not_of_the_contract(chunks, raw):
    with pytest.raises(CallError) as e:
        await ask(chunks, sse(raw))
    assert e.value.code == "engine_protocol"


@pytest.mark.parametrize("chunks", CLIENTS)
async def test_ids_out_of_the_vocabulary(chunks):
    sample, _ = await ask(chunks, sse(*chunks(SCRIPT)), vocabulary=57)
    assert sample.untrainable == "token_out_of_vocabulary" and sample.ids == SCRIPT and sample.logprobs == []
    sample, _ = await ask(chunks, sse(*chunks(SCRIPT)), vocabulary=58)
    assert not sample.untrainable


async def test_an_unknown_id_is_never_sent():
    """A real engine may die of it."""

    def answer(_: Asked) -> Raw:
        return Raw(sse(*sglang(SCRIPT)))

    async with serving(answer) as server:
        client = SGLang(server.url, 4096)
        try:
            for prompt in ([1, 55], [-1]):
                with pytest.raises(CallError) as e:
                    await client.generate(place(prompt=prompt, vocabulary=52).order)
                assert e.value.code == "prompt_out_of_vocabulary" and not server.asked
            await client.generate(place(vocabulary=52).order)
            # What the engine sampled, it knows.
            await client.generate(place(prompt=[1, 55], vocabulary=52).order)
            with pytest.raises(CallError):
                await client.generate(place(prompt=[1, 58], vocabulary=52).order)
            assert len(server.asked) == 2
        finally:
            await client.close()


@pytest.mark.parametrize("chunks", CLIENTS)
async def test_tokens_after_the_end(chunks):
    late = chunks([*SCRIPT, 5, 6], step=len(SCRIPT))[-2 if chunks is vllm_chunks else -1]
    parts = [sse(*chunks(SCRIPT, step=9), done=False), sse(late)]
    sample, placed = await ask_in_parts(chunks, parts)
    assert sample.ids == placed.pieces == SCRIPT and sample.end == "stop"
    assert sample.untrainable == "engine_protocol"


async def test_a_count_that_does_not_fit():
    body = vllm_chunks(SCRIPT)
    body[-1]["usage"]["completion_tokens"] += 1
    sample, _ = await ask(vllm_chunks, sse(*body))
    assert sample.untrainable == "engine_protocol"
    gap = incremental(SCRIPT)
    del gap[1]
    with pytest.raises(AssertionError):
        check(place(), (await ask(incremental, sse(*gap)))[0], SCRIPT, [])
    sample, placed = await ask(incremental, sse(*gap))
    assert sample.ids == placed.pieces == SCRIPT[:2] and sample.untrainable == "engine_protocol"


async def test_a_history_that_changes():
    """Cumulative chunks must repeat what they said."""
    parts = [sse(*sglang(SCRIPT)[:2], done=False), sse(*sglang([9, *SCRIPT[1:]])[2:])]
    sample, placed = await ask_in_parts(sglang, parts)
    assert sample.ids == placed.pieces == SCRIPT[:4] and sample.untrainable == "engine_protocol"


@pytest.mark.parametrize("size", [200 << 10, 2 << 20])
@pytest.mark.parametrize("chunks", CLIENTS)
async def test_long_lines(chunks, size):
    body = spoiled(chunks, lambda c: c.__setitem__("text", "x" * size))
    sample, placed = await ask(chunks, sse(*body))
    assert not sample.untrainable and sample.ids == placed.pieces == SCRIPT


def test_a_line_without_an_end_is_given_up():
    events = Events(limit=100)
    with pytest.raises(TooLong):
        for _ in range(20):
            events.push(b"data: xxx")


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_events_however_they_are_cut(newline):
    body = sse({"a": "ü\n"}, {"b": 2}).replace(b"\n\n", newline * 2)
    whole = Events().push(body)
    assert [json.loads(e) for e in whole[:2]] == [{"a": "ü\n"}, {"b": 2}] and whole[2] == b"[DONE]"
    for at in range(len(body)):
        events = Events()
        assert events.push(body[:at]) + events.push(body[at:]) == whole
