from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from polar.completion import Completion, resolve_prompts
from polar.config import Model, Settings
from polar.store.capture import CaptureStore, Grant
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.task import SamplingSpec
from proxy.codec import Codec
from proxy.server import Server
from tests.proxy import toy_tokenizer
from tests.proxy.fake_engine import FakeEngine, Reply

_numbers = itertools.count()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory) -> Path:
    return toy_tokenizer.build(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def codec(tokenizer_folder) -> Iterator[Codec]:
    row = Model(engine="", tokenizer=str(tokenizer_folder), tool_parser="qwen3", reasoning_parser="think")
    codec = Codec("toy", row)
    yield codec
    codec.close()


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    engine = await FakeEngine().start()
    yield engine
    await engine.stop()


class World:
    """A proxy in front of a scripted engine, with its store."""

    def __init__(self, redis_url: str, engine: FakeEngine, folder: Path, codec: Codec):
        self.codec, self.engine = codec, engine
        row = Model(
            engine=engine.url,
            tokenizer=str(folder),
            tool_parser="qwen3",
            reasoning_parser="think",
            context_length=4096,
            max_new_tokens=512,
        )
        self.settings = Settings(store=redis_url, namespace=f"t{next(_numbers)}", models={"policy": row})
        self.redis = connect(redis_url)
        self.store = CaptureStore(self.redis, Keys(self.settings.namespace))
        self.servers: list[Server] = []

    async def serve(self, **options) -> Server:
        server = Server(self.settings, **options)
        self.servers.append(server)
        await server.start()
        return server

    @property
    def server(self) -> Server:
        return self.servers[-1]

    def mint(self, session: str = "t.s0", attempt: int = 1, **limits) -> tuple[str, Grant]:
        sampling = limits.pop("sampling", SamplingSpec())
        grant = Grant(session_id=session, attempt=attempt, task_id="t", model="policy", sampling=sampling, **limits)
        return self.store.mint(grant), grant

    def ids(self, text: str, end: bool = True) -> list[int]:
        encoded = self.codec._tokenizer.encode(text, add_special_tokens=False)
        return [*encoded, *sorted(self.codec.stop_ids)][: len(encoded) + end]

    def says(self, text: str, end: bool = True, **options) -> Reply:
        reply = Reply(ids=self.ids(text, end), **options)
        self.engine.replies.append(reply)
        return reply

    def stored(self, grant: Grant) -> list[Completion]:
        return self.store.read(grant.attempt_id)

    def check_prompts(self, grant: Grant) -> None:
        """What the stream says the prompts were is what the engine was sent."""
        completions = self.stored(grant)
        sent = {s.body["rid"]: s.body["input_ids"] for s in self.engine.served}
        prompts = resolve_prompts(completions)
        assert {c: p.tolist() for c, p in prompts.items()} == {c: sent[c] for c in prompts}

    async def until_stored(self, grant: Grant, n: int, timeout: float = 10.0) -> list[Completion]:
        async with asyncio.timeout(timeout):
            while len(found := await asyncio.to_thread(self.stored, grant)) < n:
                await asyncio.sleep(0.01)
        return found

    async def close(self) -> None:
        for server in self.servers:
            await server.stop()
        self.redis.close()


@pytest.fixture
async def bare_world(redis_url, engine, tokenizer_folder, codec) -> AsyncIterator[World]:
    world = World(redis_url, engine, tokenizer_folder, codec)
    yield world
    await world.close()


@pytest.fixture
async def world(bare_world) -> World:
    await bare_world.serve(heartbeat=0.2)
    return bare_world
