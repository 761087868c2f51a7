"""How a proxy ends: in time whatever the engine does, with its answers stored, and its clients sent to its successor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest

from proxy.engines.sglang import SGLang
from proxy.server import STOP_SECONDS, Server
from tests.proxy.chat_client import ask, body
from tests.proxy.engine_orders import place
from tests.proxy.fake_servers import Asked, Raw, serving, sglang_chunks, sse

HANGS = 60.0  # seconds: what takes longer than that in a test would not have ended


class Hung:
    """An engine that gives some tokens and then nothing more until `release`, and answers no abort either."""

    def __init__(self, ids: list[int]):
        self.ids, self.release = ids, asyncio.Event()

    def __call__(self, asked: Asked) -> Raw:
        chunks = sse(*sglang_chunks(self.ids, end=None), done=False) if asked.path == "/generate" else b""
        return Raw(chunks, hold=self.release)


@contextlib.asynccontextmanager
async def behind(world, hung: Hung) -> AsyncIterator[Server]:
    """A proxy in front of it."""
    async with serving(hung) as engine:
        row = msgspec.structs.replace(world.settings.models["policy"], engine=engine.url)
        world.settings = msgspec.structs.replace(world.settings, models={"policy": row})
        yield await world.serve()


async def until_sampled(server: Server) -> None:
    async with asyncio.timeout(10):
        while not any(g.events for g in server.service._running.values()):
            await asyncio.sleep(0.01)


async def stopped(world, server: Server, seconds: float = STOP_SECONDS) -> None:
    world.servers.remove(server)
    await asyncio.wait_for(server.stop(seconds), HANGS)


# Engines -------------------------------------------------------------------------------------------------------------


async def test_a_hung_engine_costs_no_sample(bare_world):
    ids = bare_world.ids("The quick brown fox")[:4]
    async with behind(bare_world, Hung(ids)) as server:
        capability, grant = bare_world.mint()
        task = asyncio.create_task(ask(bare_world, capability))
        await until_sampled(server)
        await stopped(bare_world, server)
        (c,) = bare_world.stored(grant)
        assert c.finish_reason == "abort" and c.sampled_ids.tolist() == ids and not c.untrainable
        status, _, headers = await task
        assert status == 503 and headers["Connection"] == "close"
        # An agent that gives up over it isn't to blame.
        assert bare_world.store.notes(grant.attempt_id)["infra"].startswith("proxy_stopping: ")


async def test_what_is_being_aborted_already_is_hurried(monkeypatch):
    monkeypatch.setattr("proxy.engines.server.DRAIN", 1000.0)
    async with serving(Hung([5, 6])) as engine:
        client, placed = SGLang(engine.url, 4096), place()
        task = asyncio.create_task(client.generate(placed.order))
        async with asyncio.timeout(10):
            while not placed.pieces:
                await asyncio.sleep(0.01)
        placed.order.cancel.set()
        async with asyncio.timeout(10):
            while not any(a.path == "/abort_request" for a in engine.asked):
                await asyncio.sleep(0.01)
        client.hurry(0.05)
        sample = await asyncio.wait_for(task, HANGS)
        assert sample.end == "abort" and sample.ids == [5, 6]
        await client.close()


# Clients -------------------------------------------------------------------------------------------------------------


async def test_a_leaving_proxy_keeps_no_connection(bare_world):
    """An idle one is closed at once; one with a request on its way is refused with the word to close it."""
    hung = Hung(bare_world.ids("The quick brown fox")[:4])
    async with behind(bare_world, hung) as server:
        capability, _ = bare_world.mint()
        task = asyncio.create_task(ask(bare_world, capability))
        await until_sampled(server)
        host, port = server.url.removeprefix("http://").split(":")
        idle, busy = [await asyncio.open_connection(host, int(port)) for _ in range(2)]
        sent = json.dumps(body(text="more")).encode()
        head = f"POST /s/{capability}/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(sent)}\r\n\r\n"
        busy[1].write(head.encode() + sent[:5])
        async with asyncio.timeout(10):
            while server.listener.requests_count < 2 or len(server.listener.connections) < 3:
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(stopped(bare_world, server, HANGS))  # until the engine gives way
        assert await asyncio.wait_for(idle[0].read(), HANGS) == b""
        busy[1].write(sent[5:])
        answer = await asyncio.wait_for(busy[0].read(), HANGS)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nconnection: close\r\n" in answer.lower()
        assert not stopping.done()
        hung.release.set()
        await stopping
        await task
        for _, writer in (idle, busy):
            writer.close()


# Sockets -------------------------------------------------------------------------------------------------------------


async def models(path: Path, capability: str) -> int:
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http,
        http.get(f"http://proxy/s/{capability}/v1/models") as response,
    ):
        return response.status


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "sock"


async def test_a_new_proxy_takes_the_socket_over_and_nobody_is_refused(bare_world, path):
    capability, _ = bare_world.mint()
    old = await bare_world.serve(socket=str(path))
    statuses: list[int] = []
    ended = asyncio.Event()

    async def callers() -> None:
        while not ended.is_set():
            statuses.append(await models(path, capability))

    calling = asyncio.create_task(callers())
    new = await bare_world.serve(socket=str(path))
    async with asyncio.timeout(HANGS):
        while new.listener.requests_count < 3 and not calling.done():
            await asyncio.sleep(0.01)
    before = old.listener.requests_count
    await stopped(bare_world, old)
    n = len(statuses)
    async with asyncio.timeout(HANGS):
        while len(statuses) < n + 3 and not calling.done():
            await asyncio.sleep(0.01)
    ended.set()
    await calling
    assert set(statuses) == {200} and old.listener.requests_count == before > 0
    assert os.listdir(path.parent) == ["sock"] and path.stat().st_mode & 0o777 == 0o666
    await stopped(bare_world, new)
    assert os.listdir(path.parent) == []


async def test_what_a_killed_proxy_left_is_taken_over(bare_world, path):
    path.parent.mkdir()
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as left:
        left.bind(str(path))
    await bare_world.serve(socket=str(path))
    assert await models(path, bare_world.mint()[0]) == 200


async def test_a_start_that_fails_leaves_the_socket_to_whom_it_belongs(bare_world, path):
    await bare_world.serve(socket=str(path), admin_port=0)
    taken = int(bare_world.server.admin_url.rpartition(":")[2])
    failing = Server(bare_world.settings, socket=str(path), admin_port=taken)
    with pytest.raises(OSError):
        await failing.start()
    await failing.stop()
    assert await models(path, bare_world.mint()[0]) == 200


async def test_what_is_no_socket_is_not_replaced(bare_world, path):
    path.parent.mkdir()
    path.write_text("somebody's notes")
    server = Server(bare_world.settings, socket=str(path))
    with pytest.raises(OSError, match=r"sock .*isn't a socket"):
        await server.start()
    await server.stop()
    assert path.read_text() == "somebody's notes" and os.listdir(path.parent) == ["sock"]
