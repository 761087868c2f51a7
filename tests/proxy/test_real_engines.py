"""The proxy in front of real engines, the embedded one and SGLang: real sampling, real log-probabilities, real aborts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from polar.completion import resolve_prompts
from polar.config import Model, Settings
from polar.store.capture import CaptureStore, Grant
from polar.store.connection import connect
from polar.store.keys import Keys
from proxy.server import Server

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "compose" / "sglang-cpu"
SGLANG = os.environ.get("POLAR_SGLANG_VENV", "")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    models = pytest.importorskip("engine.models", reason="the embedded engine needs its extra (torch)")
    errors = pytest.importorskip("engine.errors")
    try:
        return models.prepare("tiny-random", tmp_path_factory.mktemp("models"))
    except errors.ModelError as e:
        pytest.skip(f"no tiny model: {e}")


@contextlib.asynccontextmanager
async def running_engine(model: Path, folder: Path):
    ready = folder / "engine-url"
    command = [sys.executable, "-m", "engine", "--model", str(model), "--port-file", str(ready)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        async with asyncio.timeout(120):
            while not ready.exists():
                assert process.returncode is None, "the engine exited"
                await asyncio.sleep(0.1)
        yield ready.read_text().strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


@contextlib.asynccontextmanager
async def running_sglang(model: Path, folder: Path):
    if not SGLANG:
        pytest.skip(f"POLAR_SGLANG_VENV isn't set; install it with {RECIPE / 'install.sh'} VENV")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with (folder / "sglang.log").open("w") as log:
        words = [str(RECIPE / "start.sh"), SGLANG, str(model), str(port)]
        process = await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log, start_new_session=True)
    try:
        async with asyncio.timeout(240):
            while "ready to roll" not in (folder / "sglang.log").read_text():
                assert process.returncode is None, (folder / "sglang.log").read_text()[-2000:]
                await asyncio.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 20)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)


ENGINES = [
    pytest.param(running_engine, id="embedded"),
    pytest.param(running_sglang, id="sglang", marks=[pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]),
]


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_session_on_a_real_engine(engine, model_folder, tmp_path, redis_url):
    async with engine(model_folder, tmp_path) as url:
        row = Model(
            engine=url,
            tokenizer=str(model_folder),
            tool_parser="qwen3",
            reasoning_parser="think",
            context_length=2048,
            max_new_tokens=200,
        )
        settings = Settings(store=redis_url, namespace="embedded", models={"policy": row})
        client = connect(redis_url)
        client.flushall()
        store = CaptureStore(client, Keys("embedded"))
        grant = Grant(session_id="e.s0", attempt=1, task_id="e", model="policy")
        capability = store.mint(grant)
        server = Server(settings, heartbeat=1.0)
        await server.start()
        try:
            await converse(server, capability)
        finally:
            await server.stop()
        completions = store.read(grant.attempt_id)
    assert [c.link for c in completions[:4]] == ["first", "continued", "continued", "continued"]
    assert len(resolve_prompts(completions)) == len(completions) == 5
    for c in completions:
        assert not c.untrainable and len(c.logprobs) == len(c.sampled_ids) > 0
        assert (c.logprobs < 0).all() and c.versions[-1].end == len(c.sampled_ids)
    assert completions[1].cached_tokens > 0  # the engine saw the same prefix again
    assert completions[4].finish_reason == "abort" and len(completions[4].sampled_ids) < 200


async def converse(server: Server, capability: str) -> None:
    api: Any = openai.AsyncOpenAI(base_url=f"{server.url}/s/{capability}/v1", api_key="x", max_retries=0)
    messages: list = [{"role": "user", "content": "Say something."}]
    for turn in range(4):
        if turn % 2:
            text = ""
            stream = await api.chat.completions.create(model="m", messages=messages, max_tokens=24, stream=True)
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        else:
            answer = await api.chat.completions.create(model="m", messages=messages, max_tokens=24)
            text = answer.choices[0].message.content
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"More, {turn}."}]
    stream = await api.chat.completions.create(model="m", messages=messages, stream=True)
    async for chunk in stream:
        if chunk.choices[0].delta.content:
            break
    await stream.close()
    await api.close()
