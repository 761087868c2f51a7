"""An engine of one's own that wants a key: `polar doctor` and `polar demo`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import msgspec
import pytest

from cli.stack import get_json, toml
from polar.config import Model, Settings
from tests.workers.cluster import until

KEY = "engine-secret"


@pytest.fixture(scope="module")
def keyed_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("engine")
    file = folder / "url"
    argv = [
        sys.executable,
        "-m",
        "engine",
        "--model",
        "tiny-random",
        "--data-dir",
        str(folder),
        "--port-file",
        str(file),
    ]
    with subprocess.Popen(argv, env={**os.environ, "POLAR_ENGINE_API_KEY": KEY}) as process:
        try:
            until(lambda: file.exists() or process.poll() is not None, 120)
            yield file.read_text().strip()
        finally:
            process.terminate()


def test_an_engine_with_a_key_is_asked_with_it(keyed_engine, tmp_path):
    def row(**changes) -> Model:
        return Model(engine=keyed_engine, tokenizer="t", **changes)

    models = {
        "sglang": row(api_key_env="GOOD_KEY"),
        "openai": row(api_key_env="GOOD_KEY", protocol="openai"),
        "wrong": row(api_key_env="WRONG_KEY"),
        "unset": row(api_key_env="UNSET_KEY"),
        "none": row(protocol="vllm"),
    }
    r = polar("doctor", models, tmp_path)
    assert r.returncode == 1, r.stderr
    found = {c["name"].removeprefix("engine:"): (c["status"], c["detail"]) for c in json.loads(r.stdout)["checks"]}
    assert found["sglang"][0] == found["openai"][0] == "ok", found
    assert "tiny-random" in found["openai"][1]
    assert found["wrong"] == ("fail", f"{keyed_engine}: refuses the key in WRONG_KEY")
    assert found["unset"][0] == "fail" and "UNSET_KEY is not set here" in found["unset"][1]
    assert found["none"][0] == "fail" and "models.none.api_key_env" in found["none"][1]
    assert KEY not in r.stdout + r.stderr and "other" not in r.stdout


@pytest.mark.slow
def test_a_demo_on_it_is_judged_by_what_was_captured(keyed_engine, tmp_path):
    """The engine's count is of all its users, and here there is another one."""
    info = get_json(f"{keyed_engine}/model_info", key=KEY)
    row = Model(
        engine=keyed_engine,
        tokenizer=info["tokenizer_path"],
        tool_parser="qwen3",
        context_length=8192,
        max_new_tokens=64,
        api_key_env="GOOD_KEY",
    )
    with other_traffic(keyed_engine) as sampled:
        r = polar("demo", {"policy": row}, tmp_path, "--samples", "1")
    assert r.returncode == 0, r.stderr
    line = json.loads(r.stdout.splitlines()[-1])
    assert sampled and line["engine_tokens"] is None and "the engine's own count is not used" in r.stderr
    assert (line["sessions"], line["errors"], line["unaccounted_tokens"]) == (8, 0, 0) and line["trace_tokens"] > 0


def polar(command: str, models: dict[str, Model], folder: Path, *args: str) -> subprocess.CompletedProcess:
    config = folder / "polar.toml"
    config.write_text(toml(msgspec.to_builtins(Settings(data_dir=str(folder), models=models))))
    env = {k: v for k, v in os.environ.items() if not k.startswith("POLAR_")} | {"GOOD_KEY": KEY, "WRONG_KEY": "other"}
    return subprocess.run(
        [sys.executable, "-m", "cli.main", command, "--json", "--config", str(config), *args],
        capture_output=True, text=True, env=env, timeout=240,
    )  # fmt: skip


@contextlib.contextmanager
def other_traffic(url: str):
    """Somebody else's generations, as long as it lasts; the list of their lengths."""
    lengths: list[int] = []
    over = threading.Event()

    def generate() -> None:
        body = {"input_ids": [1, 5], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
        request = urllib.request.Request(
            f"{url}/generate",
            json.dumps(body).encode(),
            {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
        )
        while not over.wait(0.2):
            with urllib.request.urlopen(request, timeout=60) as reply:
                lengths.append(json.load(reply)["meta_info"]["completion_tokens"])

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield lengths
    finally:
        over.set()
        thread.join()
