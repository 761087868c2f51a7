"""Engines that are away, break off or answer nonsense, and parsers that fail: no token is lost, none is guessed."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from polar import arrays
from proxy.engines import pool, sglang
from proxy.engines.base import Order
from tests.proxy.chat_client import ask, post, read_until
from tests.proxy.fake_engine import FakeEngine, Reply


async def test_an_engine_that_is_away_is_waited_for(world):
    capability, grant = world.mint()
    world.says("back", status=503)
    world.says("back")
    status, answer, _ = await ask(world, capability)
    assert status == 200 and world.engine.refused == 1
    await world.engine.stop()
    task = asyncio.create_task(ask(world, capability, text="again"))
    await asyncio.sleep(0.3)  # at least one refused connection
    await world.engine.start()
    world.says("restarted")
    status, answer, _ = await task
    assert status == 200 and answer["choices"][0]["message"]["content"] == "restarted"
    assert world.store.usage(grant.attempt_id)[0].turns == 2


async def test_an_engine_that_stays_away_is_a_503_with_retry_after(bare_world, monkeypatch):
    monkeypatch.setattr(sglang.SGLang.__init__, "__defaults__", (None, 0.5))
    await bare_world.serve()
    await bare_world.engine.stop()
    capability, grant = bare_world.mint()
    for stream in (False, True):
        status, answer, headers = await ask(bare_world, capability, stream=stream)
        assert status == 503 and int(headers["Retry-After"]) > 0 and answer["error"]["code"] == "engine_unavailable"
    assert bare_world.stored(grant) == [] and bare_world.store.usage(grant.attempt_id)[0].turns == 0
    assert bare_world.store.notes(grant.attempt_id)["infra"].startswith("engine_unavailable"), (
        "RUN must know whose fault"
    )
    assert bare_world.redis.hlen(bare_world.store.keys.inflight(grant.attempt_id)) == 0


async def test_an_engine_that_breaks_off_resets_the_stream(world, monkeypatch):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.3)
    capability, grant = world.mint()
    world.says("The quick brown fox", drop_after=3)
    async with post(world, capability, stream=True) as response:
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    (c,) = await world.until_stored(grant, 1)
    assert c.finish_reason == "error" and len(c.sampled_ids) == 3
    world.says("The quick brown fox", drop_after=3)
    status, _, headers = await ask(world, capability, text="whole")
    assert status == 503 and "Retry-After" in headers


def drop_logprobs(chunk: dict) -> None:
    chunk["meta_info"]["output_token_logprobs"].pop()


def shift_ids(chunk: dict) -> None:
    chunk["meta_info"]["output_token_logprobs"][0][1] += 1


def null_logprob(chunk: dict) -> None:
    chunk["meta_info"]["output_token_logprobs"][0][0] = None


def no_logprobs(chunk: dict) -> None:
    del chunk["meta_info"]["output_token_logprobs"]


@pytest.mark.parametrize(
    "spoil, reason",
    [
        (drop_logprobs, "logprob_mismatch"),
        (shift_ids, "logprob_mismatch"),
        (null_logprob, "logprob_not_finite"),
        (no_logprobs, "logprobs_missing"),
    ],
)
async def test_logprobs_that_do_not_fit_are_never_guessed(world, spoil, reason):
    capability, grant = world.mint()
    world.says("hello there", spoil=spoil)
    status, answer, _ = await ask(world, capability)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "hello there"
    (c,) = world.stored(grant)
    assert c.untrainable == reason and len(c.logprobs) == 0 and len(c.sampled_ids) > 0


def endless_counts(chunk: dict) -> None:
    chunk["meta_info"]["cached_tokens"] = 10**30
    if chunk["meta_info"]["finish_reason"]:
        chunk["meta_info"]["finish_reason"]["matched"] = -(1 << 70)


def endless_logprob(chunk: dict) -> None:
    chunk["meta_info"]["output_token_logprobs"][0][0] = -(10**400)


@pytest.mark.parametrize(("spoil", "reason"), [(endless_counts, ""), (endless_logprob, "logprob_unknown")])
async def test_numbers_that_cannot_be_stored_cost_no_token(world, spoil, reason):
    capability, grant = world.mint()
    world.says("hello there", spoil=spoil)
    status, answer, _ = await ask(world, capability)
    assert (
        status == 200 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= answer["usage"]["prompt_tokens"]
    )
    (c,) = world.stored(grant)
    assert c.untrainable == reason and len(c.sampled_ids) == world.engine.sampled
    assert reason or c.stop_matched is None


async def test_version_spans(world):
    capability, grant = world.mint()
    ids = world.ids("hello there")
    spans = [{"version": "v1", "start": 0, "end": 2}, {"version": "v2", "start": 2, "end": len(ids)}]
    world.says("hello there", versions=spans)
    await ask(world, capability)
    world.says("hello there", versions=spans[1:])
    await ask(world, capability, text="gap")
    good, gap = world.stored(grant)
    assert [(v.version, v.start, v.end) for v in good.versions] == [("v1", 0, 2), ("v2", 2, len(ids))]
    assert gap.untrainable == "versions_mismatch" and gap.versions == []


async def test_an_incremental_stream_reads_the_same(world):
    world.engine.incremental = True
    capability, grant = world.mint()
    world.says("The quick brown fox jumps over the lazy dog.")
    _, answer, _ = await ask(world, capability)
    assert answer["choices"][0]["message"]["content"] == "The quick brown fox jumps over the lazy dog."
    (c,) = world.stored(grant)
    assert c.sampled_ids.tolist() == world.ids("The quick brown fox jumps over the lazy dog.") and not c.untrainable


async def test_a_contradicted_stream_is_broken_off_and_replayed(world, monkeypatch):
    """Should a parser ever take back what was streamed, the client must not be left with it."""
    capability, grant = world.mint()
    served = world.server.service.table.pick("policy", "policy")
    parse = served.codec.parse

    whole = len(world.ids("The quick brown fox")) - 1

    def fickle(ids, tail, tools):
        parsed = parse(ids, tail, tools)
        return msgspec.structs.replace(parsed, content="Something else.") if len(ids) >= whole else parsed

    monkeypatch.setattr(served.codec, "parse", fickle)
    reply = world.says("The quick brown fox", hold_after=3)
    async with post(world, capability, stream=True) as response:
        await read_until(response, "The")
        reply.release.set()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    await world.until_stored(grant, 1)
    async with post(world, capability, stream=True) as response:
        got = await response.read()
    assert b"Something else." in got and b"[DONE]" in got and len(world.engine.served) == 1


async def test_who_joins_a_contradicted_answer_waits_for_it(world, monkeypatch):
    """With a heartbeat now and then, not with a flood of them."""
    capability, _ = world.mint()
    service = world.server.service
    codec, end = service.table.pick("policy", "policy").codec, service.store.end
    parse, storing, go_on = codec.parse, asyncio.Event(), asyncio.Event()
    whole = len(world.ids("The quick brown fox")) - 1

    def fickle(ids, tail, tools):
        parsed = parse(ids, tail, tools)
        return msgspec.structs.replace(parsed, content="Something else.") if len(ids) >= whole else parsed

    async def slow_end(*args):
        storing.set()
        await go_on.wait()
        await end(*args)

    monkeypatch.setattr(codec, "parse", fickle)
    monkeypatch.setattr(service.store, "end", slow_end)
    reply = world.says("The quick brown fox", hold_after=3)
    async with post(world, capability, stream=True) as response:
        await read_until(response, "The")
        reply.release.set()
        await storing.wait()
        async with post(world, capability, stream=True) as joined:
            await read_until(joined, "assistant")
            assert await joined.content.readany()  # a heartbeat
            sent = service.metrics.heartbeats._value.get()
            go_on.set()
            got = await joined.content.read()
    assert b"Something else." in got and b"quick" not in got and sent <= 3


async def test_two_engines_worth_of_chunking_agree():
    """Cumulative and incremental chunks of the same sample read the same, however they are cut."""
    results = []
    for incremental in (False, True):
        for seed in range(5):
            engine = await FakeEngine(incremental=incremental, seed=seed).start()
            client = sglang.SGLang(engine.url, 4096)
            try:
                results.append(await collect(client, engine))
            finally:
                await client.close()
                await engine.stop()
    assert all(r == results[0] for r in results)


async def collect(client: sglang.SGLang, engine: FakeEngine):
    engine.replies.append(Reply(ids=list(range(50, 90))))
    pieces: list[int] = []
    order = Order(
        rid="r",
        prompt=arrays.ids([1, 2, 3]),
        sampling={"max_new_tokens": 100, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        stop_ids=[0],
        tokens=pieces.extend,
        accepted=lambda: None,
        cancel=asyncio.Event(),
    )
    sample = await client.generate(order)
    assert pieces == sample.ids == list(range(50, 90))
    return sample.logprobs, sample.versions, sample.end, sample.cached_tokens


async def test_a_parser_that_fails_costs_no_token(world, monkeypatch):
    capability, grant = world.mint()
    served = world.server.service.table.pick("policy", "policy")

    def broken(*_):
        raise RuntimeError("scripted")

    monkeypatch.setattr(served.codec, "parse", broken)
    for stream in (False, True):
        world.says("hello there")
        async with post(world, capability, text=str(stream), stream=stream) as response:
            assert b"hello there" in await response.read()
    assert [c.sampled_ids.tolist() for c in world.stored(grant)] == [world.ids("hello there")] * 2
