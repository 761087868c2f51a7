"""Bytes and calls of hostile clients, and the bystander that must be served all the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
JSON = "Content-Type: application/json"


async def ask(world, capability: str, content: str = "go", session: aiohttp.ClientSession | None = None, **more) -> Any:
    data = {"model": "m", "messages": [{"role": "user", "content": content}], **more}
    async with contextlib.AsyncExitStack() as stack:
        http = session or await stack.enter_async_context(aiohttp.ClientSession())
        async with http.post(f"{world.server.url}/s/{capability}{CHAT}", json=data) as response:
            return response.status, response.headers, await response.read()


async def served(world, n: int = 0) -> None:
    """Another session's call is answered right."""
    capability, grant = world.mint(f"bystander.s{n}")
    world.says("All is well.")
    status, _, data = await ask(world, capability)
    assert status == 200 and json.loads(data)["choices"][0]["message"]["content"] == "All is well."
    assert len(world.stored(grant)) == 1


async def connect(world) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", int(world.server.url.rpartition(":")[2]))


async def raw(world, data: bytes) -> tuple[int, dict]:
    """Status and JSON body of the answer to bytes as they are; status 0 if the connection ends without one."""
    reader, writer = await connect(world)
    with contextlib.suppress(ConnectionError):
        writer.write(data)
        await writer.drain()
    async with asyncio.timeout(30):
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            length = int(head.lower().split("content-length:")[1].split("\r\n")[0])
            answer = await reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            return 0, {}
        finally:
            writer.close()
    return int(head.split(" ")[1]), json.loads(answer)


def head(path: str, *headers: str, method: str = "POST", version: str = "1.1") -> bytes:
    lines = [f"{method} {path} HTTP/{version}", "Host: x", *headers]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def refused(status: int, answer: dict) -> None:
    assert 400 <= status < 500 and answer["error"]["message"] and answer["error"]["code"]


WELL: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "go"}]}
