"""`python -m proxy` as a process: readiness, signals, a kill in the middle of a session, and what it logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import aiohttp
import msgspec
import pytest

from polar.errors import InvalidConfig

ROOT = Path(__file__).parents[2]


def config(world, folder: Path) -> Path:
    row = msgspec.to_builtins(world.settings.models["policy"])
    lines = [f'store = "{world.settings.store}"', f'namespace = "{world.settings.namespace}"', "[models.policy]"]
    lines += [f"{k} = {json.dumps(v)}" for k, v in row.items() if v is not None]
    path = folder / "polar.toml"
    path.write_text("\n".join(lines))
    return path


class Process:
    def __init__(self, folder: Path, *args: str):
        self.folder, self.args = folder, args
        self.url = ""

    async def __aenter__(self) -> Process:
        ready = self.folder / "url"
        ready.unlink(missing_ok=True)
        self.log = self.folder / "log"
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "proxy", "--port-file", str(ready), *self.args]
            self.process = await asyncio.create_subprocess_exec(*command, stderr=log, cwd=self.folder, env=env)
        async with asyncio.timeout(60):
            while not ready.exists():
                assert self.process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)
        self.url = ready.read_text()
        return self

    async def __aexit__(self, *_) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def ask(url: str, capability: str, *messages: dict) -> dict:
    body = {"model": "m", "messages": list(messages)}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/s/{capability}/v1/chat/completions", json=body) as response,
    ):
        answer = await response.json()
        assert response.status == 200, answer
        return answer["choices"][0]["message"]


async def test_kill_and_restart_in_mid_session(bare_world, tmp_path):
    world = bare_world
    capability, grant = world.mint()
    args = ("--config", str(config(world, tmp_path)), "--socket", str(tmp_path / "p.sock"))
    first = {"role": "user", "content": "the secret word is xylophone"}
    async with Process(tmp_path, *args) as proxy:
        world.says("Heard.")
        answer = await ask(proxy.url, capability, first)
        world.says("The quick brown fox", hold_after=2)
        with contextlib.suppress(aiohttp.ClientError):
            task = asyncio.create_task(ask(proxy.url, capability, first, answer, {"role": "user", "content": "on"}))
            await world.engine.until(lambda: len(world.engine.served) == 2)
            proxy.process.kill()
            await task
    # The dead proxy's generation is known to be lost, and the session goes on where it was.
    async with Process(tmp_path, *args) as proxy:
        world.says("Going on.")
        await ask(proxy.url, capability, first, answer, {"role": "user", "content": "on"})
        one, two = world.stored(grant)
        assert two.link == "continued" and two.parent_id == one.completion_id
        world.check_prompts(grant)
        # SIGTERM in the middle of an answer: what was sampled is stored, and the exit is clean.
        world.says("The quick brown fox", hold_after=3)
        task = asyncio.create_task(ask(proxy.url, capability, {"role": "user", "content": "more"}))
        await world.engine.until(lambda: world.engine.served[-1].sent == 3)
        proxy.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(proxy.process.wait(), 20) == 0
        await asyncio.gather(task, return_exceptions=True)
    assert len(world.stored(grant)[-1].sampled_ids) == 3
    log = proxy.log.read_text()
    assert capability not in log and "xylophone" not in log and "quick" not in log
    lines = [json.loads(line) for line in log.splitlines()]
    assert {"session", "completion"} <= set(next(e for e in lines if e["message"] == "completion stored"))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tool_parser": "qwen9"}, ["models.policy.tool_parser", "qwen9", "qwen3"]),
        ({"renderer": "nobody", "tool_parser": None, "reasoning_parser": None}, ["models.policy.renderer", "nobody"]),
        ({"tokenizer": "/nowhere"}, ["models.policy.tokenizer", "/nowhere"]),
        ({"renderer": "qwen3"}, ["models.policy.tool_parser", "template"]),
    ],
)
async def test_a_wrong_model_row_is_refused_at_start(bare_world, change, words):
    row = msgspec.structs.replace(bare_world.settings.models["policy"], **change)
    bare_world.settings = msgspec.structs.replace(bare_world.settings, models={"policy": row})
    with pytest.raises(InvalidConfig) as e:
        await bare_world.serve()
    bare_world.servers.clear()
    assert all(w in e.value.message for w in words)
