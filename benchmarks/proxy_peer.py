"""LiteLLM's proxy as a peer, in an environment of its own: $POLAR_LITELLM_VENV, else one that is made once under the
temporary folder."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.proxy_rig import Process, process

VERSION = "1.81.0"
KEY = "sk-bench"


def environment() -> Path:
    """The folder of a virtual environment that has LiteLLM's proxy."""
    if given := os.environ.get("POLAR_LITELLM_VENV"):
        return Path(given)
    folder = Path(tempfile.gettempdir()) / f"polar-litellm-{VERSION}"
    if not (folder / "ready").exists():
        print(f"installing litellm {VERSION} into {folder}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(folder / "bin" / "pip"), "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, f"litellm[proxy]=={VERSION}"], check=True, stdout=sys.stderr)
        (folder / "ready").touch()
    return folder


@contextlib.asynccontextmanager
async def litellm(folder: Path, engine: str) -> AsyncIterator[Process]:
    """The peer, ready, in front of the engine's chat endpoint, with one worker and no database."""
    home = environment()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    params = {"model": "openai/policy", "api_base": f"{engine}/v1", "api_key": "none"}
    settings = {
        "model_list": [{"model_name": "policy", "litellm_params": params}],
        "general_settings": {"master_key": KEY},
        "litellm_settings": {"num_retries": 0, "telemetry": False},
    }
    config = folder / "litellm.yaml"
    config.write_text(json.dumps(settings))
    command = [str(home / "bin" / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    env = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    url = f"http://127.0.0.1:{port}"
    async with process(folder, "litellm", *command, env=env, url=f"{url}/health/liveliness", within=120) as started:
        yield Process(url, started.pid)
