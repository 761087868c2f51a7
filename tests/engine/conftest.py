"""Fixtures: the tiny model, a plain transformers copy of it to compare with, and servers in this process."""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from engine.errors import ModelError
from engine.models import prepare
from engine.options import Options


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory) -> Path:
    """A folder for prepared models."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def tiny(models_dir) -> Path:
    """The folder of tiny-random."""
    try:
        return prepare("tiny-random", models_dir)
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def other(tiny, tmp_path_factory) -> Path:
    """The same model with other weights."""
    from engine.tiny import write_model

    folder = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(tiny, folder)
    write_model(folder, seed=7)
    return folder


@pytest.fixture(scope="session")
def plain(tiny):
    """Plain transformers: f(ids, temperature=1, folder=tiny) -> log-probabilities [len(ids), vocab]."""
    import torch
    from transformers import AutoModelForCausalLM

    nets = {}

    def logprobs(ids: list[int], temperature: float = 1.0, folder: Path = tiny):
        if folder not in nets:
            nets[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            return torch.log_softmax(nets[folder](torch.tensor([ids])).logits[0] / temperature, dim=-1)

    return logprobs


@functools.cache
def _tokenizer(folder: Path):
    from engine.tokenizer import Tokenizer

    return Tokenizer(folder)


class Client:
    """Talks to one server; `engine` is the engine behind it."""

    def __init__(self, engine, url: str, session: aiohttp.ClientSession):
        self.engine, self.url, self.session = engine, url, session

    async def call(self, path: str, body=None, method: str = "POST", **kwargs):
        """(status, parsed JSON or text)."""
        async with self.session.request(method, self.url + path, json=body, **kwargs) as answer:
            text = await answer.text()
            is_json = answer.content_type == "application/json"
            return answer.status, json.loads(text) if is_json else text

    async def generate(self, ids=None, *, params=None, status: int = 200, **fields):
        """The parsed answer of /generate."""
        body = {"sampling_params": params or {}, **fields}
        if ids is not None:
            body["input_ids"] = ids
        code, answer = await self.call("/generate", body)
        assert code == status, answer
        return answer

    async def stream(self, ids, *, params=None, **fields) -> list[dict]:
        """All chunks of a streamed /generate; checks the framing."""
        body = {"input_ids": ids, "sampling_params": params or {}, "stream": True, **fields}
        async with self.session.post(self.url + "/generate", json=body) as answer:
            assert answer.status == 200
            assert answer.content_type == "text/event-stream"
            events = (await answer.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]

    def start(self, *args, **kwargs) -> asyncio.Task:
        """Generate in the background."""
        return asyncio.create_task(self.generate(*args, **kwargs))

    async def until(self, condition, seconds: float = 20) -> None:
        """Wait for a condition."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)

    async def running(self, count: int = 1, tokens: int = 1) -> None:
        """Wait until so many requests have sampled so many tokens."""
        live = self.engine.live
        await self.until(lambda: sum(len(item.output) >= tokens for item in live.values()) >= count)

    async def metric(self, name: str) -> float:
        """The value of a metric."""
        _, text = await self.call("/metrics", method="GET")
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"sglang:{name}{{")))


@pytest_asyncio.fixture
async def serve(tiny, monkeypatch):
    """Start servers: async with serve(**options) -> Client."""
    import engine.core
    from engine.core import Engine
    from engine.server import create_app

    # Reading a tokenizer takes half a second, and it has no state.
    monkeypatch.setattr(engine.core, "Tokenizer", _tokenizer)

    @asynccontextmanager
    async def start(api_key: str | None = None, folder: Path = tiny, **options):
        engine = Engine(folder, Options(**{"weight_version": "v0", "kv_bytes": 256 << 20, **options}))
        app = create_app(engine, api_key)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            async with aiohttp.ClientSession() as session:
                yield Client(engine, f"http://127.0.0.1:{port}", session)
        finally:
            await runner.cleanup()

    yield start


@pytest_asyncio.fixture
async def client(serve):
    """A server with the default options."""
    async with serve() as client:
        yield client


@pytest.fixture
def prompt() -> list[int]:
    """A short prompt."""
    return [1, 4093, 198, 6004, 2, 198, 1, 520, 9531, 198]
