"""A stream that can't be finished, as the agent in its sandbox sees it: the proxy's own process behind a Unix socket, and
what carries connections to it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from polar.sandbox import ProxyEndpoint
from polar.store.capture import Grant
from tests.proxy.test_process import Process, config
from tests.runtimes.test_answers import entered

CHAT = "/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "go"}], "stream": True}
ANTHROPIC = "/v1/messages", CHAT[1] | {"max_tokens": 100}
RESPONSES = "/v1/responses", {"model": "m", "input": "go", "stream": True}
GOOGLE = "/v1beta/models/m:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "go"}]}]}


class Agent:
    """Bare bytes: HTTP clients differ in what they make of a clean end."""

    def __init__(self, port: int):
        self.port = port

    async def __aenter__(self) -> Agent:
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_) -> None:
        self.writer.transport.abort()

    async def ask(self, capability: str, path: str, body: dict) -> None:
        data = json.dumps(body).encode()
        head = f"POST /s/{capability}{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()

    async def until(self, text: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(text), 20)

    async def ends(self) -> bytes:
        """What comes until the end. ConnectionResetError: it is a break."""
        return await asyncio.wait_for(self.reader.read(), 20)


LAST = b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("carrier", ["forwarder", "relay"])
async def test_no_broken_stream_has_a_clean_end(bare_world, tmp_path, carrier):
    world, path = bare_world, str(tmp_path / "p.sock")
    arguments = ("--config", str(config(world, tmp_path)), "--socket", path)
    endpoint = ProxyEndpoint(url="http://unused:1", socket=path)
    async with Process(tmp_path, *arguments) as proxy, contextlib.AsyncExitStack() as agents:
        port = agents.enter_context(entered(carrier, endpoint))

        async def begin(n: int, dialect: tuple[str, dict]) -> tuple[Agent, Grant]:
            """A whole answer, then half of one on the same connection."""
            capability, grant = world.mint(f"t.s{n}")
            world.says("Whole.")
            agent = await agents.enter_async_context(Agent(port))
            await agent.ask(capability, *dialect)
            assert (await agent.until(LAST)).startswith(b"HTTP/1.1 200")
            world.says("The quick brown fox jumps", hold_after=4)
            await agent.ask(capability, *dialect)
            await agent.until(b"The")
            return agent, grant

        for n, dialect in enumerate((CHAT, ANTHROPIC, RESPONSES)):
            agent, grant = await begin(n, dialect)
            await asyncio.to_thread(world.store.revoke, grant.attempt_id)
            with pytest.raises(ConnectionResetError):
                await agent.ends()

        agent, grant = await begin(3, GOOGLE)  # its clients want an end, with an error in it
        await asyncio.to_thread(world.store.revoke, grant.attempt_id)
        assert b'"error"' in await agent.until(LAST)

        cut, _ = await begin(4, CHAT)
        cut_short, _ = await begin(5, GOOGLE)
        proxy.process.kill()
        for broken in (cut, cut_short):
            with pytest.raises(ConnectionResetError):
                await broken.ends()
        assert await agent.ends() == b""  # it had its whole answer
