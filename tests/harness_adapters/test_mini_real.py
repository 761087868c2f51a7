"""Runs of the real mini-swe-agent against a scripted model: the bundled one (POLAR_HARNESSES), on the host, and the one in
the image that `polar images build mini_swe_agent` makes, if that is there."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from harness_adapters.registry import load_adapter
from polar.config import Settings
from polar.errors import InfraError
from polar.launch import Endpoint
from polar.sandbox import ProxyEndpoint
from polar.task import AgentSpec, RuntimeSpec, Volume
from runtimes import bwrap
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime

BUNDLE = Path(os.environ.get("POLAR_HARNESSES", "")) / "mini_swe_agent"
MINI = str(BUNDLE / "bin/mini") if (BUNDLE / "bundle.json").is_file() else ""
IMAGE = "polar-sandbox:mini_swe_agent"
pytestmark = pytest.mark.harness
DONE = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class Model(ThreadingHTTPServer):
    """Answers the n-th chat request with the n-th command of `script` as a call of the tool `bash`."""

    daemon_threads = True

    def __init__(self, script: list[str]):
        self.script = script
        self.seen: list[tuple[str, str, dict]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Model

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        n = len(self.server.seen)
        self.server.seen.append((self.path, self.headers["Authorization"], request))
        arguments = json.dumps({"command": self.server.script[min(n, len(self.server.script) - 1)]})
        call = {"id": f"call_{n}", "type": "function", "function": {"name": "bash", "arguments": arguments}}
        message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
        answer = {
            "id": f"c{n}",
            "object": "chat.completion",
            "created": 1,
            "model": request["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10},
        }
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def model() -> Iterator[Model]:
    server = Model(["echo made by mini > made.txt", DONE])
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(params=["none", "bwrap", pytest.param("docker", marks=pytest.mark.docker)])
def box(request, tmp_path, model):
    settings, kind = Settings(data_dir=str(tmp_path / "data")), request.param
    runtime: Any = LocalRuntime(settings)
    spec = RuntimeSpec(options={"isolation": kind})
    if kind == "docker":
        runtime, spec = DockerRuntime(settings), RuntimeSpec(image=IMAGE)
        if not (found := runtime.available())[0]:
            pytest.skip(f"no Docker engine: {found[1]}")
    elif not MINI:
        pytest.skip("POLAR_HARNESSES has no bundle of mini_swe_agent")
    elif kind == "bwrap":
        if isinstance(missing := bwrap.find(), str):
            pytest.skip(f"no working bubblewrap: {missing}")
        spec.volumes = [Volume(source=str(BUNDLE), target="/polar/mini")]
    try:
        made = runtime.create(
            spec, labels={}, proxy=ProxyEndpoint(url=f"http://127.0.0.1:{model.server_port}"), timeout=30
        )
    except InfraError as e:
        if e.code != "image_missing":
            raise
        pytest.skip(e.message)
    yield made
    made.destroy()


def launch(box, instruction: str, **settings):
    boxed = box.ref.state.get("isolation") == "bwrap"
    command = "mini" if box.ref.backend == "docker" else "/polar/mini/bin/mini" if boxed else MINI
    agent = AgentSpec(harness="mini_swe_agent", settings={"command": command, **settings})
    adapter = load_adapter(agent)
    endpoint = Endpoint(base_url=f"{box.ref.proxy_url}/s/cap", api_key="cap", model="policy")
    plan = adapter.plan(agent, instruction, endpoint)
    for f in plan.files:
        box.write(f.path, f.content.encode(), mode=f.mode)
    r = box.exec(plan.argv, env=plan.env, timeout=120)
    return plan, r, adapter.outcome(r.exit_code, r.output.decode("utf-8", "replace"))


def test_it_works_and_submits(box, model, tmp_path):
    instruction = "Make \u0085 'made.txt'\n{{ not a template }} \U0001f600"
    plan, result, outcome = launch(box, instruction)
    assert outcome.termination == "finished", result.output
    assert outcome.notes == {"turns": 2, "tool_calls": 2, "tool_errors": 0}
    assert box.exec("cat made.txt", timeout=10).output == b"made by mini\n"
    assert [(path, key, r["model"]) for path, key, r in model.seen] == [
        ("/s/cap/v1/chat/completions", "Bearer cap", "polar-model")
    ] * 2
    assert instruction in model.seen[0][2]["messages"][1]["content"]
    assert "stream" not in model.seen[0][2] and "temperature" not in model.seen[0][2]
    assert not box.download(plan.artifacts[0], tmp_path / "traj.json", limit=1 << 20)
    assert json.loads((tmp_path / "traj.json").read_text())["info"]["exit_status"] == "Submitted"


def test_its_own_step_limit_is_told(box, model):
    model.script = ["true"]
    _, result, outcome = launch(box, "Loop", step_limit=2)
    notes = {"exit_status": "LimitsExceeded", "turns": 2, "tool_calls": 2, "tool_errors": 0}
    assert (outcome.termination, outcome.notes) == ("turn_limit", notes), result.output
    assert len(model.seen) == 2
