"""A generation that the engine interrupts goes on from its own ids, and is one completion."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from polar.completion import VersionSpan
from proxy.engines import pool
from proxy.engines.base import Sample
from proxy.engines.resume import Joined
from proxy.engines.sglang import SGLang
from proxy.failures import CallError
from tests.proxy.engine_orders import PROMPT, check, continuing, place
from tests.proxy.fake_engine import FakeEngine, Reply

SCRIPT = [*range(50, 90), 0]


@pytest.fixture(params=[False, True], ids=["cumulative", "incremental"])
async def engine(request):
    engine = await FakeEngine(incremental=request.param, seed=3).start()
    yield engine
    await engine.stop()


@pytest.fixture
async def client(engine):
    client = SGLang(engine.url, 4096)
    yield client
    await client.close()


@pytest.mark.parametrize("how", ["abort_after", "drop_after"])
async def test_an_interruption_is_not_seen(engine, client, how):
    continuing(engine, SCRIPT, {how: 7}, {how: 5})
    placed = place(limit=60, sampling={"seed": 11})
    sample = await client.generate(placed.order)
    check(placed, sample, SCRIPT, [7, 12])
    assert sample.end == "stop" and sample.stop_matched == 0 and sample.resumed == 2 == client.resumed
    bodies = [s.body for s in engine.served]
    assert [b["input_ids"] for b in bodies] == [PROMPT, PROMPT + SCRIPT[:7], PROMPT + SCRIPT[:12]]
    assert [b["sampling_params"]["max_new_tokens"] for b in bodies] == [60, 53, 48]
    assert len({b["rid"] for b in bodies}) == len({b["sampling_params"]["sampling_seed"] for b in bodies}) == 3
    assert sample.versions == [VersionSpan("v1", 0, len(SCRIPT))], "one version is one span over all pieces"


async def test_versions_get_the_right_places(engine, client):
    def swap(body):
        done = body["input_ids"][len(PROMPT) :]
        engine.version = f"v{1 + bool(done)}"
        return Reply(ids=SCRIPT[len(done) :], abort_after=None if done else 9)

    engine.default = swap
    sample = await client.generate(place().order)
    assert sample.versions == [VersionSpan("v1", 0, 9), VersionSpan("v2", 9, len(SCRIPT))]


async def test_an_unknown_version_in_one_piece_is_not_guessed(engine, client):
    def forget(chunk):
        del chunk["meta_info"]["weight_version"]
        chunk["meta_info"].pop("weight_versions", None)

    continuing(engine, SCRIPT, {"abort_after": 9}, {"spoil": forget})
    sample = await client.generate(place().order)
    assert sample.ids == SCRIPT and sample.untrainable == "versions_unknown" and not sample.versions


async def test_a_bad_logprob_in_one_piece_spoils_the_whole(engine, client):
    def null(chunk):
        if chunk["meta_info"]["output_token_logprobs"]:
            chunk["meta_info"]["output_token_logprobs"][0][0] = None

    continuing(engine, SCRIPT, {"abort_after": 9}, {"spoil": null})
    sample = await client.generate(place().order)
    assert sample.ids == SCRIPT and sample.untrainable == "logprob_not_finite" and sample.logprobs == []


async def test_the_limit_is_that_of_the_whole(engine, client):
    continuing(engine, SCRIPT, {"abort_after": 10})
    placed = place(limit=25)
    sample = await client.generate(placed.order)
    check(placed, sample, SCRIPT[:25], [10])
    assert sample.end == "length"
    # Interrupted exactly at the limit, or behind the end token: there is nothing left to ask for.
    continuing(engine, SCRIPT, {"drop_after": 25})
    placed = place(rid="c-2", limit=25)
    assert (await client.generate(placed.order)).end == "length" and placed.pieces == SCRIPT[:25]
    before = len(engine.served)
    engine.default = lambda _: Reply(ids=[50, 0, 7], abort_after=2)
    sample = await client.generate(place(rid="c-3").order)
    assert (sample.end, sample.stop_matched, sample.ids) == ("stop", 0, [50, 0]) and len(engine.served) == before + 1


async def test_it_waits_for_an_engine_that_restarts(engine, client):
    continuing(engine, SCRIPT, {"drop_after": 9}, {"status": 503}, {"status": 503})
    placed = place()
    check(placed, await client.generate(placed.order), SCRIPT, [9])
    assert client.retries == 2 and client.resumed == 1


async def test_there_is_an_end_to_patience(engine, client, monkeypatch):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.2)
    continuing(engine, SCRIPT, {"drop_after": 9}, *[{"status": 503}] * 50)
    sample = await client.generate(place().order)
    assert sample.end == "failed" and sample.ids == SCRIPT[:9] and len(sample.logprobs) == 9
    monkeypatch.setattr("proxy.engines.resume.MAX_RESUMES", 3)
    continuing(engine, SCRIPT, *[{"abort_after": 2}] * 10)
    sample = await client.generate(place(rid="c-2").order)
    assert sample.end == "abort" and sample.ids == SCRIPT[:8] and len(sample.logprobs) == 8


async def test_a_refusal_to_go_on_keeps_what_there_is(engine, client):
    continuing(engine, SCRIPT, {"drop_after": 9}, {"status": 400})
    sample = await client.generate(place().order)
    assert sample.end == "failed" and sample.ids == SCRIPT[:9] and not sample.untrainable


async def test_a_cancelled_generation_does_not_go_on(engine, client):
    continuing(engine, SCRIPT, {"hold_after": 9})
    placed = place()
    task = asyncio.create_task(client.generate(placed.order))
    await engine.until(lambda: engine.sampled == 9)
    placed.order.cancel.set()
    sample = await asyncio.wait_for(task, 5)
    assert sample.end == "abort" and sample.ids == SCRIPT[:9] and len(engine.served) == 1


class Gate:
    """Closed until `open`."""

    def __init__(self) -> None:
        self.asked, self.open = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.asked.set()
        await self.open.wait()


async def test_it_goes_on_when_the_gate_opens(engine, client, monkeypatch):
    monkeypatch.setattr(pool, "RESUME_WINDOW", 0.2)  # the gate's time isn't charged
    continuing(engine, SCRIPT, {"abort_after": 9}, {"status": 503})
    gate = Gate()
    placed = place(gate=gate)
    task = asyncio.create_task(client.generate(placed.order))
    await gate.asked.wait()
    await asyncio.sleep(0.3)
    assert len(engine.served) == 1 and engine.refused == 0
    gate.open.set()
    check(placed, await task, SCRIPT, [9])


async def test_the_gate_holds_what_was_ended_before_its_first_token(engine, client):
    client._window = 0.2  # the gate's time isn't charged
    continuing(engine, SCRIPT, {"abort_after": 0})
    gate = Gate()
    placed = place(gate=gate)
    task = asyncio.create_task(client.generate(placed.order))
    await gate.asked.wait()
    await asyncio.sleep(0.3)
    assert len(engine.served) == 1
    gate.open.set()
    check(placed, await task, SCRIPT, [])
    assert client.resumed == 0


async def test_there_are_pauses_between_attempts_that_end_before_a_token(engine, client):
    """Such an engine is healthy, but not ready: three pauses of 0.07, 0.14 and 0.28 s at least fill the window."""
    client._window = 0.5
    engine.default = lambda _: Reply(ids=SCRIPT, abort_after=0)
    with pytest.raises(CallError) as e:
        await client.generate(place().order)
    assert e.value.code == "engine_unavailable" and 2 <= len(engine.served) <= 4
    assert client.servers[0].up, "it isn't taken out for that"


async def test_a_grammar_is_not_taken_up_in_the_middle(engine, client):
    continuing(engine, SCRIPT, {"abort_after": 9})
    sample = await client.generate(place(schema={}).order)
    assert sample.end == "abort" and sample.ids == SCRIPT[:9] and sample.untrainable == "constrained"


# Stop strings --------------------------------------------------------------------------------------------------------


def letters(ids: list[int]) -> str:
    return "".join(chr(i) for i in ids)


def engine_side(text: str, stops: list[str], seen: int) -> tuple[int, str | None]:
    """Where an engine that begins at `seen` would end: it looks for stop strings in its own text only."""
    for n in range(seen + 1, len(text) + 1):
        for stop in stops:
            if stop in text[seen:n]:
                return n, stop
    return len(text), None


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("abc", min_size=1, max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=2),
    cuts=st.lists(st.integers(1, 24), max_size=3),
    step=st.integers(1, 5),
)
def test_stop_strings_end_it_where_an_uninterrupted_engine_would(text, stops, cuts, step):
    whole, expected = engine_side(text, stops, 0)
    placed = place(limit=len(text), sampling={"stop": stops}, decode=letters)
    joined, at = Joined(placed.order, True), 0
    for cut in [*sorted({c for c in cuts if c < whole}), None]:
        ask = joined.ask()
        assert letters(ask.prompt.tolist()[len(PROMPT) :]) == text[:at]
        end, stop = engine_side(text, stops, at)
        upto = end if cut is None else min(cut, end)
        piece: list[int] = []
        for start in range(at, upto, step):
            new = [ord(c) for c in text[start : min(start + step, upto)]]
            piece += new
            if ask.tokens(new):
                break
        kind = "abort" if upto < end else "stop" if stop else "length"
        more = joined.add(Sample(ids=piece, logprobs=[-1.0] * len(piece), end=kind, stop_matched=stop))
        at += len(piece)
        if not more:
            break
    sample = joined.sample()
    assert letters(sample.ids) == letters(placed.pieces) == text[:whole]
    assert len(sample.logprobs) == whole
    assert sample.stop_matched == expected and sample.end == ("stop" if expected else "length")


# Through the proxy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_the_client_sees_one_answer(world, stream):
    capability, grant = world.mint()
    text = "The quick brown fox jumps over the lazy dog. 🎁 The dog sleeps."
    ids = world.ids(text)
    world.engine.replies.append(Reply(ids=ids, abort_after=5))
    world.engine.replies.append(Reply(ids=ids[5:], drop_after=4))
    world.engine.replies.append(Reply(ids=ids[9:]))
    body = {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": stream}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{world.server.url}/s/{capability}/v1/chat/completions", json=body) as response,
    ):
        raw = await response.read()
    if stream:
        chunks = [json.loads(line[6:]) for line in raw.decode().split("\n\n") if line.startswith("data: {")]
        got = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks)
        assert raw.endswith(b"data: [DONE]\n\n")
    else:
        got = json.loads(raw)["choices"][0]["message"]["content"]
    assert got == text
    (c,) = world.stored(grant)
    assert c.sampled_ids.tolist() == ids and len(c.logprobs) == len(ids) and not c.untrainable
    assert c.finish_reason == "stop" and world.store.usage(grant.attempt_id)[0].turns == 1
    prompt = world.engine.served[0].body["input_ids"]
    assert [s.body["input_ids"] for s in world.engine.served] == [prompt, prompt + ids[:5], prompt + ids[:9]]
    assert len(c.prompt_tail) + c.prompt_shared == len(prompt)
