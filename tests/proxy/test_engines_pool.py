"""Several servers of one model: who stays where, who is out, what is tried again."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest

from polar.config import Model
from polar.errors import InvalidConfig
from proxy.engines import server
from proxy.engines.sglang import SGLang
from proxy.failures import CallError
from proxy.table import Table
from tests.proxy.engine_orders import place
from tests.proxy.fake_engine import FakeEngine, Reply

IDS = [5, 6, 7, 0]


@pytest.fixture
async def engines():
    engines = [await FakeEngine(seed=i).start() for i in range(3)]
    for engine in engines:
        engine.default = lambda _: Reply(ids=IDS)
    yield engines
    for engine in engines:
        await engine.stop()


@pytest.fixture
async def client(engines):
    client = SGLang([e.url for e in engines], 4096, None, 0.5)
    yield client
    await client.close()


async def ask(client: SGLang, session: str, n: int = 0) -> None:
    sample = await client.generate(place(rid=f"c-{session}-{n}", session=session).order)
    assert sample.ids == IDS and sample.end == "stop"


def where(engines: list[FakeEngine], session: str) -> list[int]:
    return [i for i, e in enumerate(engines) for s in e.served if s.body["rid"].startswith(f"c-{session}-")]


async def until_up(client: SGLang, n: int) -> None:
    async with asyncio.timeout(10):
        while sum(s.up for s in client.servers) != n:
            await asyncio.sleep(0.01)


async def test_a_session_stays_and_sessions_spread(client, engines):
    for n in range(3):
        for s in "abcdef":
            await ask(client, s, n)
    homes = {s: where(engines, s) for s in "abcdef"}
    assert all(len(set(h)) == 1 for h in homes.values())
    assert sorted(h[0] for h in homes.values()) == [0, 0, 1, 1, 2, 2]


async def test_an_ended_session_has_no_home(client, engines):
    for s in "abc":
        await ask(client, s)
    for s in "abx":
        client.forget(s)
    assert sum(s.sessions for s in client.servers) == 1 and list(client._homes) == ["c"]


async def test_the_idlest_server_is_next(client, engines):
    for engine in engines[:2]:
        engine.default = lambda _: Reply(ids=IDS, hold_after=1)
    held = [asyncio.create_task(ask(client, s)) for s in "ab"]
    await asyncio.gather(*(e.until(lambda e=e: e.sampled == 1) for e in engines[:2]))
    for s in "cdef":
        await ask(client, s)
    assert len(engines[2].served) == 4
    for engine in engines[:2]:
        engine._aborted["c-a-0" if "c-a-0" in engine._aborted else "c-b-0"].set()
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


@pytest.mark.parametrize("how", ["gone", "503", "no token"])
async def test_a_failure_goes_elsewhere_at_once(client, engines, how, monkeypatch):
    monkeypatch.setattr(server, "PROBE_EVERY", (30.0, 30.0))
    await ask(client, "a")
    home = where(engines, "a")[0]
    if how == "gone":
        await engines[home].stop()
    elif how == "503":
        engines[home].default = lambda _: Reply(status=503)
    else:
        engines[home].default = lambda _: Reply(ids=IDS, drop_after=0)
    for n in range(1, 4):
        await ask(client, "a", n)
    now = where(engines, "a")
    assert len(set(now)) == 2 and client.moved == 1 and client.retries == 1, "it is not asked again while it is out"
    assert [s.up for s in client.servers].count(False) == 1
    state = client.state()["servers"][home]
    assert not state["up"] and state["strikes"] == 1 and state["why"]


async def test_a_server_comes_back_and_gets_new_sessions(client, engines, monkeypatch):
    monkeypatch.setattr(server, "PROBE_EVERY", (0.02, 0.05))
    await ask(client, "a")
    home = where(engines, "a")[0]
    await engines[home].stop()
    await ask(client, "a", 1)
    await until_up(client, 2)
    await engines[home].start()
    await until_up(client, 3)
    await ask(client, "a", 2)
    assert where(engines, "a")[-1] != home or len(set(where(engines, "a"))) == 2
    for s in "bcd":
        await ask(client, s)
    assert engines[home].served[-1].body["rid"] != "c-a-0"


async def test_a_broken_stream_goes_on_elsewhere(client, engines):
    await ask(client, "a")
    home = where(engines, "a")[0]

    def dies(body):
        return Reply(ids=IDS, drop_after=2)

    engines[home].default = dies
    for i, engine in enumerate(engines):
        if i != home:
            engine.default = lambda body: Reply(ids=IDS[len(body["input_ids"]) - 3 :])
    await ask(client, "a", 1)
    rest = [s for i, e in enumerate(engines) if i != home for s in e.served]
    assert [s.body["input_ids"] for s in rest] == [[1, 2, 3, 5, 6]] and client.resumed == 1


async def test_all_servers_away(client, engines):
    for engine in engines:
        await engine.stop()
    with pytest.raises(CallError) as e:
        await ask(client, "a")
    assert e.value.code == "engine_unavailable" and e.value.retry_after
    patient = SGLang([e.url for e in engines], 4096)
    try:
        task = asyncio.create_task(ask(patient, "a", 1))
        async with asyncio.timeout(10):
            while patient.retries < 4:
                await asyncio.sleep(0.01)
        await engines[1].start()
        await task
    finally:
        await patient.close()
    assert where(engines, "a") == [1]


async def test_what_ends_before_its_first_token_goes_elsewhere_once(client, engines):
    await ask(client, "a")
    home = where(engines, "a")[0]
    engines[home].replies.append(Reply(ids=IDS, abort_after=0))
    await ask(client, "a", 1)
    assert all(s.up for s in client.servers) and client.retries == 1 and len(set(where(engines, "a"))) == 2


async def test_servers_that_all_end_it_before_a_token_are_asked_in_rounds(client, engines):
    for engine in engines:
        engine.default = lambda _: Reply(ids=IDS, abort_after=0)
    with pytest.raises(CallError) as e:
        await ask(client, "a")
    assert e.value.code == "engine_unavailable"
    assert len(where(engines, "a")) <= 4 * len(engines), "a window of 0.5 s has three pauses at most"


async def test_a_busy_server_stays_in(client, engines):
    await ask(client, "a")
    home = where(engines, "a")[0]
    engines[home].replies.append(Reply(status=429))
    await ask(client, "a", 1)
    assert all(s.up for s in client.servers) and client.retries == 1


async def test_a_malformed_answer_is_asked_for_elsewhere_only(client, engines):
    def spoil(chunk):
        chunk["output_ids"] = "x"

    await ask(client, "a")
    home = where(engines, "a")[0]
    engines[home].default = lambda _: Reply(ids=IDS, spoil=spoil)
    await ask(client, "a", 1)
    for engine in engines:
        engine.default = lambda _: Reply(ids=IDS, spoil=spoil)
    before = sum(len(e.served) for e in engines)
    with pytest.raises(CallError) as e:
        await ask(client, "b")
    assert e.value.code == "engine_protocol"
    assert sum(len(e.served) for e in engines) - before <= 3


async def test_a_refusal_is_nobodys_fault(client, engines):
    for engine in engines:
        engine.default = lambda _: Reply(status=400, error={"message": "longer than the model's context length"})
    with pytest.raises(CallError) as e:
        await ask(client, "a")
    assert e.value.kind == "context_overflow" and all(s.up for s in client.servers)
    assert sum(e.refused for e in engines) == 1


async def test_an_unsupported_grammar_is_the_callers_to_know(client, engines):
    for engine in engines:
        engine.default = lambda _: Reply(status=400, error={"message": "no grammar backend"})
    with pytest.raises(CallError) as e:
        await client.generate(place(schema={"type": "object"}).order)
    assert (e.value.kind, e.value.code) == ("bad_request", "unsupported_response_format")
    assert "no grammar backend" in e.value.message


async def test_a_schema_is_sent_and_marked(client, engines):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given, sent in ((schema, schema), ({}, {"type": "object"})):
        sample = await client.generate(place(schema=given).order)
        assert sample.untrainable == "constrained" and sample.ids == IDS and sample.logprobs == []
        body = next(e.served[-1].body for e in engines if e.served)
        assert msgspec.json.decode(body["sampling_params"]["json_schema"]) == sent
        for engine in engines:
            engine.served.clear()


@pytest.mark.parametrize(
    "urls, words",
    [
        ([], ["models.policy.engine", "empty"]),
        ("somewhere:80", ["models.policy.engine", "somewhere:80", "http://"]),
        (["http://a", "http://a/"], ["models.policy.engine", "http://a", "twice"]),
    ],
)
async def test_wrong_rows(bare_world, urls, words):
    row = msgspec.structs.replace(bare_world.settings.models["policy"], engine=urls)
    with pytest.raises(InvalidConfig) as e:
        await Table(msgspec.structs.replace(bare_world.settings, models={"policy": row})).open()
    assert all(w in e.value.message for w in words)


def test_rows_read():
    row = msgspec.convert({"engine": ["http://a", "http://b"], "tokenizer": "t", "protocol": "vllm"}, Model)
    assert row.engines == ["http://a", "http://b"]
    with pytest.raises(msgspec.ValidationError, match="protocol"):
        msgspec.convert({"engine": "http://a", "tokenizer": "t", "protocol": "tgi"}, Model)


async def test_several_servers_behind_the_proxy(bare_world):
    """The admin plane says how they fare."""
    second = await FakeEngine().start()
    try:
        world = bare_world
        row = msgspec.structs.replace(world.settings.models["policy"], engine=[world.engine.url, second.url])
        world.settings = msgspec.structs.replace(world.settings, models={"policy": row})
        await world.serve(admin_port=0)
        capability, _ = world.mint()
        for engine in (world.engine, second):
            engine.default = lambda _: Reply(ids=world.ids("hi"))
        async with aiohttp.ClientSession() as http:
            for n in range(3):
                body = {"messages": [{"role": "user", "content": str(n)}]}
                url = f"{world.server.url}/s/{capability}/v1/chat/completions"
                async with http.post(url, json=body) as response:
                    assert response.status == 200
            assert sorted((len(world.engine.served), len(second.served))) == [0, 3]
            home = world.engine if world.engine.served else second
            await home.stop()
            async with http.post(url, json={"messages": [{"role": "user", "content": "x"}]}) as response:
                assert response.status == 200
            async with http.get(f"{world.server.admin_url}/health") as response:
                assert response.status == 200
                servers = (await response.json())["engines"]["policy"]["servers"]
            assert [s["up"] for s in servers if s["url"] == home.url] == [False]
            async with http.get(f"{world.server.admin_url}/metrics") as response:
                text = await response.text()
            assert f'polar_proxy_engine_up{{model="policy",server="{home.url}"}} 0.0' in text
            assert 'polar_proxy_engine_retries_total{model="policy"} 1.0' in text
    finally:
        await second.stop()
