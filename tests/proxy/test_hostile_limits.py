"""Clients that hold on to what everybody needs: connections, buffers, calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading

import aiohttp

from proxy import body, delivery, listener
from proxy.gate import Limits
from tests.proxy.fake_engine import Reply
from tests.proxy.hostile_client import CHAT, JSON, WELL, ask, connect, head, served


async def test_slow_heads_are_cut_off(bare_world, monkeypatch):
    monkeypatch.setattr(listener, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(body, "READ_SECONDS", 0.3)
    world = bare_world
    await world.serve()
    capability, _ = world.mint()
    slow = [await connect(world) for _ in range(50)]
    for n, (_, writer) in enumerate(slow):
        writer.write((b"POST /s/", b"")[n % 2])
    half = await connect(world)
    half[1].write(head(f"/s/{capability}{CHAT}", JSON, "Content-Length: 100") + b'{"mess')
    await served(world)
    async with asyncio.timeout(30):
        for reader, writer in slow:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
        assert b" 400 " in await half[0].readline()
    half[1].close()


async def test_idle_connections_over_the_limit_are_closed(bare_world):
    world = bare_world
    await world.serve(limits=Limits(connections=100))
    idle = [await connect(world) for _ in range(100)]
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionError):
            assert await (await connect(world))[0].read() == b""
    for _, writer in idle[:50]:
        writer.close()
    async with asyncio.timeout(30):
        while len(world.server.listener.connections) > 60:
            await asyncio.sleep(0.01)
    await served(world)
    for _, writer in idle:
        writer.close()


async def test_a_client_that_never_reads_is_dropped(bare_world, monkeypatch):
    monkeypatch.setattr(delivery, "STALLED", 0.3)
    made = listener._Handler.connection_made

    def small(self, transport):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        made(self, transport)

    monkeypatch.setattr(listener._Handler, "connection_made", small)
    world = bare_world
    await world.serve()
    capability, _ = world.mint()
    world.engine.default = lambda _: Reply(ids=world.ids("word " * 100))
    metrics = world.server.service.metrics
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(client, ("127.0.0.1", int(world.server.url.rpartition(":")[2])))
    for n in range(60):
        data = json.dumps({**WELL, "stream": True, "messages": [{"role": "user", "content": f"q {n}"}]}).encode()
        await loop.sock_sendall(client, head(f"/s/{capability}{CHAT}", JSON, f"Content-Length: {len(data)}") + data)
    async with asyncio.timeout(50):
        while not metrics.registry.get_sample_value("polar_proxy_stalled_total"):
            await asyncio.sleep(0.02)
    client.close()
    await served(world)


async def test_one_session_can_not_take_the_place_of_others(bare_world):
    world = bare_world
    await world.serve(limits=Limits(calls_per_attempt=4))
    capability, _ = world.mint("greedy.s0")
    replies = [world.says("slow", hold_after=1) for _ in range(4)]
    async with aiohttp.ClientSession() as http:
        tasks = [asyncio.create_task(ask(world, capability, f"q {n}", http)) for n in range(4)]
        await world.engine.until(lambda: len(world.engine.served) == 4)
        for n in range(20):
            status, headers, data = await ask(world, capability, f"more {n}", http)
            assert status == 503 and int(headers["Retry-After"]) >= 1
            assert json.loads(data)["error"]["code"] == "too_many_calls"
        await served(world)
        for reply in replies:
            reply.release.set()
        assert [status for status, *_ in await asyncio.gather(*tasks)] == [200] * 4
        world.says("free again")
        assert (await ask(world, capability, "last", http))[0] == 200


async def test_others_are_served_while_the_largest_bodies_are_read(world, monkeypatch):
    """Between two pieces of each body there is time for a whole call of another session."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (1 << 20)}}
    images = [{"role": "user", "content": [image] * 31}]
    short = [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(60_000)]
    bodies = [json.dumps(WELL | change).encode() for change in ({"messages": images}, {"messages": [], "x": short})]
    assert body.LIMIT - (2 << 20) < len(bodies[0]) < body.LIMIT
    begun, go_on, ended = threading.Event(), threading.Event(), []
    sizes: list[int] = []

    def leaf(raw, own=body._leaf):
        if threading.current_thread().name.startswith("read"):
            sizes.append(len(raw))
        if len(sizes) == 3 and not begun.is_set():  # in the midst of it
            begun.set()
            assert go_on.wait(30)
        return own(raw)

    monkeypatch.setattr(body, "_leaf", leaf)
    for n, data in enumerate(bodies):
        begun.clear(), go_on.clear(), sizes.clear()
        capability, _ = world.mint(f"greedy.s{n}")
        world.engine.default = lambda _: Reply(ids=world.ids("Seen."))

        async def send(path: str = f"{world.server.url}/s/{capability}{CHAT}", data: bytes = data) -> int:
            async with aiohttp.ClientSession() as http, http.post(path, data=data) as response:
                await response.read()
                ended.append(path)
                return response.status

        task = asyncio.create_task(send())
        assert await asyncio.to_thread(begun.wait, 30)
        await served(world, n)
        assert len(ended) == n
        go_on.set()
        assert await task == (200, 400)[n]
        assert len(sizes) > 10 and max(sizes) <= (1 << 20) + 100


async def test_the_process_has_a_limit_too(bare_world):
    world = bare_world
    await world.serve(limits=Limits(calls=2))
    replies = [world.says("slow", hold_after=1) for _ in range(2)]
    tasks = [asyncio.create_task(ask(world, world.mint(f"t.s{n}")[0])) for n in range(2)]
    await world.engine.until(lambda: len(world.engine.served) == 2)
    assert (await ask(world, world.mint("late.s0")[0]))[0] == 503
    for reply in replies:
        reply.release.set()
    assert [status for status, *_ in await asyncio.gather(*tasks)] == [200] * 2


async def test_reconnecting_with_one_body_samples_once(world):
    capability, grant = world.mint()
    reply = world.says("Only once.", hold_after=1)
    first = asyncio.create_task(ask(world, capability))
    await world.engine.until(lambda: len(world.engine.served) == 1)
    data = json.dumps(WELL).encode()
    request = head(f"/s/{capability}{CHAT}", JSON, f"Content-Length: {len(data)}") + data
    for _ in range(300):
        _, writer = await connect(world)
        writer.write(request)
        await writer.drain()
        writer.transport.abort()
    reply.release.set()
    status, _, answer = await first
    assert status == 200 and b"Only once." in answer
    assert len(world.engine.served) == 1 and len(world.stored(grant)) == 1
    await served(world)
