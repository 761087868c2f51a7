"""The process: start, port file, signals, refusals."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from engine.cli import main

ROOT = Path(__file__).parents[2]


def test_start_serve_and_stop(models_dir, tiny, tmp_path):
    file = tmp_path / "run" / "url"
    command = [sys.executable, "-m", "engine", "--model", "tiny-random", "--data-dir", str(models_dir)]
    process = subprocess.Popen(
        [*command, "--port-file", str(file), "--weight-version", "v3"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        url = file.read_text().strip()
        with urllib.request.urlopen(url + "/model_info", timeout=10) as answer:
            assert json.load(answer)["weight_version"] == "v3"
        body = {"input_ids": [1, 5], "sampling_params": {"max_new_tokens": 30_000, "ignore_eos": True}}
        request = urllib.request.Request(url + "/generate", json.dumps({**body, "stream": True}).encode())
        with urllib.request.urlopen(request, timeout=10) as stream:
            assert stream.readline().startswith(b"data: ")
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            *_, last, done = [line for line in stream.read().splitlines() if line]
        assert process.wait(10) == 0
        assert time.monotonic() - started < 2
        assert json.loads(last.removeprefix(b"data: "))["meta_info"]["finish_reason"]["type"] == "abort"
        assert done == b"data: [DONE]"
        assert process.stdout.read() == f"engine: serving tiny-random (float32, context 32768) on {url}\n"
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny-random", "--host", "0.0.0.0"], "--api-key"),
        (["--model", "no-such-model"], "tiny-random"),
        (["--model", "tiny-random", "--max-running", "0"], "positive"),
        (["--model", "tiny-random", "--host", "203.0.113.7", "--api-key", "k"], "can't listen"),
    ],
)
def test_refusals(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.delenv("POLAR_ENGINE_API_KEY", raising=False)
    assert main([*arguments, "--data-dir", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
