"""What /metrics says after calls whose outcome is known."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from proxy.metrics import Metrics

CHAT = "/v1/chat/completions"


class Client:
    def __init__(self, world, http: aiohttp.ClientSession):
        self.world, self.http = world, http
        self.capability, self.grant = world.mint()

    async def ask(self, *messages: dict, **more) -> bytes:
        body = {"model": "m", "messages": list(messages), **more}
        async with self.http.post(f"{self.world.server.url}/s/{self.capability}{CHAT}", json=body) as response:
            data = await response.read()
            assert response.status == 200, data
            return data


@pytest.fixture
async def client(world):
    async with aiohttp.ClientSession() as http:
        yield Client(world, http)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def value(world, name: str, **labels: str) -> float:
    return world.server.service.metrics.registry.get_sample_value(f"polar_proxy_{name}", labels) or 0.0


async def test_a_session_in_numbers(world, client):
    world.says("Hello.")
    await client.ask(user("go"))
    world.says("Going on.")
    await client.ask(user("go"), {"role": "assistant", "content": "Hello."}, user("on"), stream=True)
    world.says("Another.")
    await client.ask(user("go"))  # a delivered one again: a sibling
    one, two, _ = world.stored(client.grant)
    assert value(world, "links_total", link="first", reason="") == 1
    assert value(world, "links_total", link="continued", reason="") == 1
    assert value(world, "repeats_total", kind="sibling") == 1
    assert value(world, "calls_total", dialect="openai_chat", action="generate", status="200") == 3
    assert value(world, "tokens_total", kind="sampled") == sum(len(c.sampled_ids) for c in world.stored(client.grant))
    assert value(world, "tokens_total", kind="prompt_shared") >= one.prompt_length + len(one.sampled_ids)
    assert two.prompt_shared >= one.prompt_length
    assert value(world, "first_token_seconds_count") == value(world, "completion_seconds_count") == 3
    assert value(world, "request_bytes_count") == value(world, "added_seconds_count") == 3
    assert value(world, "generations") == value(world, "streams") == 0
    await world.engine.until(lambda: True)
    async with asyncio.timeout(10):
        while not value(world, "loop_lag_seconds_count"):
            await asyncio.sleep(0.01)


async def test_calls_without_a_completion_are_counted(world, client):
    base = f"{world.server.url}/s/{client.capability}"
    google, anthropic = {"x-goog-api-key": "x"}, {"anthropic-version": "2023-06-01"}
    messages = {"model": "m", "messages": [user("go")]}
    contents = {"contents": [{"parts": [{"text": "go"}]}]}
    for method, path, headers, sent, counted in (
        ("POST", "/v1/messages/count_tokens", {}, messages, ("anthropic", "count", "200")),
        ("POST", "/v1/messages/count_tokens", {}, {"messages": 1}, ("anthropic", "count", "400")),
        ("POST", "/v1beta/models/m:countTokens", {}, contents, ("google", "count", "200")),
        ("POST", "/v1/responses/input_tokens", {}, {"input": "go"}, ("openai_responses", "count", "200")),
        ("GET", "/v1/models", {}, None, ("openai_chat", "models", "200")),
        ("GET", "/v1/models/policy", google, None, ("google", "model", "200")),
        ("GET", "/v1/models", anthropic, None, ("anthropic", "models", "200")),
        ("GET", "/v1/responses", {}, None, ("openai_responses", "websocket", "426")),
        ("GET", "/v1/elsewhere", {}, None, ("openai_chat", "none", "404")),
        ("POST", "/v1/responses", {}, {"input": 3}, ("openai_responses", "generate", "400")),
    ):
        labels = dict(zip(("dialect", "action", "status"), counted, strict=True))
        before = value(world, "calls_total", **labels)
        async with client.http.request(method, base + path, headers=headers, json=sent) as response:
            assert response.status == int(counted[2]), await response.text()
        assert value(world, "calls_total", **labels) == before + 1, counted


def test_every_metric_is_in_the_docs():
    docs = Path(__file__).parents[2] / "docs" / "proxy.md"
    told = docs.read_text()
    for metric in Metrics().registry.collect():
        short = metric.name.removeprefix("polar_proxy_")
        assert re.search(rf"[{{,_]{short}[`{{,}}_]", told), metric.name


async def test_joins_replays_aborts_and_heartbeats(world, client):
    reply = world.says("The same for both.", hold_after=1)
    both = [asyncio.create_task(client.ask(user("go"), stream=True)) for _ in range(2)]
    async with asyncio.timeout(10):
        while not (value(world, "heartbeats_total") and value(world, "repeats_total", kind="joined")):
            await asyncio.sleep(0.01)
        assert value(world, "streams") == 2 and value(world, "generations") == 1
    reply.release.set()
    await asyncio.gather(*both)
    assert len(world.stored(client.grant)) == 1
    world.says("Nobody waits for this.", hold_after=1)
    gone = asyncio.create_task(client.ask(user("leave"), stream=True))
    await world.engine.until(lambda: len(world.engine.served) == 2)
    gone.cancel()
    async with asyncio.timeout(10):
        while not value(world, "aborts_total", reason="client"):
            await asyncio.sleep(0.01)


async def test_the_time_that_engines_take_is_not_the_proxys(world, client):
    reply = world.says("Slowly.", hold_after=1)
    clock = asyncio.get_running_loop().time
    begun = clock()
    task = asyncio.create_task(client.ask(user("go")))
    await world.engine.until(lambda: len(world.engine.served) == 1)
    asked = clock()
    await asyncio.sleep(0.3)
    held = clock() - asked
    reply.release.set()
    await task
    async with asyncio.timeout(10):
        while not value(world, "added_seconds_count"):
            await asyncio.sleep(0.01)
    assert value(world, "added_seconds_sum") <= clock() - begun - held


def test_labels_stay_few():
    metrics = Metrics()
    classes = {metrics.classed("reason", f"failed: {n}") for n in range(1000)}
    assert classes == {"failed"}
    classes = {metrics.classed("reason", "x" * n) for n in range(1, 1000)}
    assert len(classes) <= 50 and "other" in classes
    assert all(re.fullmatch("[a-z_]*", c) for c in classes)
