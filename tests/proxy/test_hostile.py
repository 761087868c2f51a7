"""What a hostile or broken client may send: it gets a 4xx that a model client can read, or the end of its connection, and
everybody else is served. Nothing here measures time."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import logging
import threading
from typing import Any

import aiohttp
import pytest

from proxy import body, logs
from tests.proxy.fake_engine import Reply
from tests.proxy.hostile_client import CHAT, JSON, WELL, ask, connect, head, raw, refused, served


@pytest.mark.parametrize(
    "data",
    [
        b'{"messages": 1}',
        b'{"messages": {"role": "user"}}',
        b'{"messages": [[]]}',
        b'{"messages": [{"role": 7, "content": "x"}]}',
        b'{"messages": [{"role": "user", "content": 7}]}',
        b'{"messages": [{"role": "user", "content": [{"type": []}]}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": "all"}',
        b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": {}}}]}',
        b'{"messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1e400}',
        b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"messages": [{"role": "user", "content": "x\x00y"}]}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"messages": [{"role": "user", "content": "x"}], "tools": '
        + b'{"a":' * 100_000
        + b"1"
        + b"}" * 100_000
        + b"}",
        b"[" + b"0," * (body.VALUES + 1) + b"0]",
        gzip.compress(b"{}", mtime=0),  # the same in every process that collects the tests
    ],
    ids=lambda d: repr(d[-30:])[:40],
)
async def test_bodies_that_are_refused(world, data):
    capability, grant = world.mint()
    request = head(f"/s/{capability}{CHAT}", JSON, f"Content-Length: {len(data)}")
    refused(*await raw(world, request + data))
    assert not world.engine.served and not world.stored(grant)
    await served(world)


@pytest.mark.parametrize("size", [1, 1 << 21])
async def test_long_bodies_are_read_beside_the_loop(world, monkeypatch, size):
    capability, grant = world.mint()
    world.says("hi")
    threads: list[str] = []

    def decode(raw: bytes, own=body.decode) -> dict:
        threads.append(threading.current_thread().name.partition("_")[0])
        return own(raw)

    monkeypatch.setattr(body, "decode", decode)
    status, _, _ = await ask(world, capability, user="x" * size)
    assert status == 200 and len(world.stored(grant)) == 1
    assert threads == ["read" if size > 1 << 20 else threading.main_thread().name]


async def test_whoever_asks_to_continue_is_told_to(world):
    capability, _ = world.mint()
    world.says("hi")
    data = json.dumps(WELL).encode()
    reader, writer = await connect(world)
    writer.write(head(f"/s/{capability}{CHAT}", JSON, "Expect: 100-continue", f"Content-Length: {len(data)}"))
    async with asyncio.timeout(10):
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(data)
        assert (await reader.readline()).split()[1] == b"200"
    writer.close()


async def test_the_last_of_doubled_keys_counts_and_content_types_are_ignored(world):
    capability, grant = world.mint()
    world.says("hi")
    data = b'{"messages": 1, "messages": [{"role": "user", "content": "x", "content": "y\\u0000z"}]}'
    request = head(f"/s/{capability}{CHAT}", "Content-Type: image/png", f"Content-Length: {len(data)}")
    assert (await raw(world, request + data))[0] == 200
    assert world.stored(grant)[0].messages[0]["content"] == "y\0z"


async def test_huge_bodies_declared_chunked_and_compressed(world):
    capability, _ = world.mint()
    path = f"/s/{capability}{CHAT}"
    status, answer = await raw(world, head(path, JSON, "Content-Length: 104857600"))
    assert status == 413 and answer["error"]["code"] == "request_too_large"

    async def endless():
        for _ in range(100):
            yield b" " * (1 << 20)

    bomb = gzip.compress(b" " * (256 << 20))
    for data, headers in ((endless(), {}), (bomb, {"Content-Encoding": "gzip"})):
        async with aiohttp.ClientSession() as http:
            with contextlib.suppress(aiohttp.ClientError):  # it may be cut off while it still sends
                async with http.post(world.server.url + path, data=data, headers=headers) as response:
                    assert response.status == 413
                    assert (await response.json())["error"]["code"] == "request_too_large"
    await served(world)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A" * 40_000 + b": b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * 5_000 + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n",
        b"\r\n\r\n\r\nnonsense\r\n\r\n",
    ],
    ids=[
        "tls",
        "huge header",
        "header flood",
        "long line",
        "version",
        "negative",
        "two lengths",
        "smuggling",
        "nul",
        "no http",
    ],
)
async def test_what_is_no_proper_http(world, request_bytes):
    status, answer = await raw(world, request_bytes)
    if status:
        refused(status, answer)
    await served(world)


@pytest.mark.parametrize("chunks", [b"zz\r\n", b"-5\r\nabc", b"fffffffffffffffff\r\nab", b"5\r\nab\r\n0\r\n\r\n"])
async def test_broken_chunks(world, chunks):
    capability, grant = world.mint()
    status, answer = await raw(world, head(f"/s/{capability}{CHAT}", JSON, "Transfer-Encoding: chunked") + chunks)
    if status:
        refused(status, answer)
    assert not world.stored(grant)
    await served(world)


async def test_paths_and_capability_tricks(world):
    capability, grant = world.mint()
    data = json.dumps(WELL).encode()
    other = capability[:-1] + ("a" if capability[-1] != "a" else "b")
    for path in (
        f"/s/{CHAT}",
        f"/s//{capability}{CHAT}",
        f"/s/{other}{CHAT}",
        f"/s/{other}/../{capability}{CHAT}",
        f"/s/%2e%2e/s/{capability}{CHAT}",
        f"/s/{capability}%00{CHAT}",
        f"/s/{capability}%2f..{CHAT}",
        f"/s/{capability}/v1%2fchat%2fcompletions/..%2f..",
        f"/s/{capability[:8]}%{CHAT}",
        f"/s/{capability}{CHAT}%0d%0aX: y",
        "/s/" + "a" * 4000 + CHAT,
    ):
        status, answer = await raw(world, head(path, JSON, f"Content-Length: {len(data)}") + data)
        refused(status, answer)
        assert capability not in json.dumps(answer)
    key = "x" * 1_000_000
    refused(*await raw(world, head(CHAT, JSON, f"Authorization: Bearer {key}", f"Content-Length: {len(data)}") + data))
    assert not world.engine.served and not world.stored(grant)


async def test_http_1_0_absolute_forms_and_pipelining(world):
    capability, grant = world.mint()
    data = json.dumps(WELL).encode()
    length = f"Content-Length: {len(data)}"
    world.says("one")
    assert (await raw(world, head(f"/s/{capability}{CHAT}", JSON, length, version="1.0") + data))[0] == 200
    world.says("two")
    assert (await raw(world, head(f"http://elsewhere/s/{capability}{CHAT}", JSON, length) + data))[0] == 200
    reader, writer = await connect(world)
    for n in range(20):
        world.says(f"answer {n}")
        more = json.dumps({**WELL, "messages": [{"role": "user", "content": f"q {n}"}]}).encode()
        writer.write(head(f"/s/{capability}{CHAT}", JSON, f"Content-Length: {len(more)}") + more)
    async with asyncio.timeout(30):
        for n in range(20):
            answer = await reader.readuntil(b"\r\n\r\n")
            size = int(answer.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            assert f"answer {n}".encode() in await reader.readexactly(size)
    writer.close()
    assert len(world.stored(grant)) == 22


CANARY = "xylophone"


@pytest.mark.parametrize("asked", [False, True], ids=["by default", "when asked for"])
async def test_what_logs_and_metrics_hold(world, monkeypatch, capsys, asked):
    """Prompts, keys and capabilities are in no log line and no metric, whatever goes wrong; prompts if asked for."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    logs.configure("DEBUG", log_prompts=asked)
    capability, grant = world.mint()
    key = "sk-secret-of-a-provider"
    url = f"{world.server.url}/s/{capability}"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}", "x-api-key": key}) as http:
            world.says("Heard the word.")
            body = {"model": CANARY, "messages": [{"role": "user", "content": f"say {CANARY}"}]}
            async with http.post(url + CHAT, json=body) as response:
                assert response.status == 200
            # Engines quote what they were sent.
            world.engine.replies.append(Reply(status=400, error={"message": f"can't take {CANARY}"}))
            async with http.post(url + CHAT, json={**body, "temperature": 1.0}) as response:
                assert response.status >= 400
            world.engine.replies.append(Reply(status=500, error={"message": f"crashed on {CANARY}"}))
            world.engine.replies.append(Reply(error={"message": f"crashed on {CANARY}", "code": 500}))
            world.says("Heard it again.")
            async with http.post(url + CHAT, json={**body, "temperature": 0.9}) as response:
                assert response.status == 200
            assert CANARY not in json.dumps(world.server.service.table.engines())
            for bad in ({"messages": CANARY}, {**body, "tool_choice": CANARY}, {**body, "stop": [CANARY * 200]}):
                async with http.post(url + CHAT, json=bad) as response:
                    assert response.status == 400
            for path in (f"/v1/{CANARY}", f"{CHAT}/{CANARY}", f"/v1/models/{CANARY}"):
                async with http.get(url + path) as response:
                    await response.read()

            def fails(*_: Any) -> None:
                raise ValueError(f"can't take {CANARY} of {capability}")

            monkeypatch.setattr(world.server.service.attempts, "get", fails)
            async with http.post(url + CHAT, json=body) as response:
                assert response.status == 500 and CANARY not in await response.text()
        await raw(world, f"{CANARY} /s/{capability} {key}\r\n\r\n".encode())
        await raw(world, head(f"/s/{capability}", f"{CANARY}: {'x' * 40_000}"))
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        logs.prompts.setLevel(logging.CRITICAL)
    written = capsys.readouterr().err
    lines = [json.loads(line) for line in written.splitlines()]
    stored = next(x for x in lines if x["message"] == "completion stored")
    assert stored["session"] == grant.session_id and stored["completion"].startswith("c")
    assert capability not in written.replace(f"{CANARY} of {capability}", "") and key not in written
    assert (CANARY in written) == asked
    metrics = world.server.service.metrics.text().decode()
    assert CANARY not in metrics and capability not in metrics and key not in metrics
