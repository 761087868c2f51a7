"""A bare client of Chat Completions, for tests of what goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json

import aiohttp


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
