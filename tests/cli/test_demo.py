"""`polar demo` and `polar up` as a user runs them, on the smallest model; interrupted, killed, run twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from openai import OpenAI

from tests.workers.cluster import until

POLAR = [sys.executable, "-m", "cli.main"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("demo")


def start(*args: str, data: Path, **more: str) -> subprocess.Popen:
    # A key of another engine may be set; the embedded one must not take it for its own.
    env = (
        {k: v for k, v in os.environ.items() if not k.startswith("POLAR_")}
        | {"POLAR_ENGINE_API_KEY": "another's"}
        | more
    )
    return subprocess.Popen(
        [*POLAR, *args, "--data-dir", str(data), "--model", "tiny-random"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True,
        # Where the tests run in the background, these are ignored, and that would be inherited.
        preexec_fn=lambda: [signal.signal(s, signal.SIG_DFL) for s in (signal.SIGINT, signal.SIGHUP)],
    )  # fmt: skip


def children_of(data: Path) -> list[str]:
    """Command lines of processes that mention this data folder."""
    out = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(data) in line:
            out.append(f"{pid} {line}")
    return out


def test_a_demo_after_a_killed_one_accounts_for_every_token_and_leaves_nothing_running(data):
    killed = start("demo", "--samples", "4", data=data)
    until(lambda: _sandboxes(data) or killed.poll() is not None, 120)
    killed.kill()
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert (data / "demo" / "polar.toml").exists() and _sandboxes(data)  # it left what the next one must cope with
    p = start("demo", "--json", "--samples", "1", data=data)
    out, err = p.communicate(timeout=240)
    assert p.returncode == 0, err
    line = json.loads(out.splitlines()[-1])
    assert set(line) == {
        "sessions", "passed", "failed", "errors", "engine_tokens", "trace_tokens", "unaccounted_tokens", "seconds", "results",
    }  # fmt: skip
    assert (line["sessions"], line["errors"], line["unaccounted_tokens"]) == (8, 0, 0)
    assert line["engine_tokens"] == line["trace_tokens"] > 0
    assert children_of(data) == [] and _sandboxes(data) == []
    assert "broker: embedded Valkey" in err
    listed = subprocess.run(
        [*POLAR, "results", "list", "--json", "--objects", line["results"].removesuffix("/results")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert len([json.loads(x) for x in listed.stdout.splitlines()]) >= 8


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_demo_clears_up(data, how):
    p = start("demo", "--samples", "4", data=data)
    begun = data / "demo" / "polar.toml"
    # Ctrl-C comes when agents are at work, the others while the stack is being started.
    until(lambda: _sandboxes(data) if how == signal.SIGINT else begun.exists(), 120)
    p.send_signal(how)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130, err
    assert children_of(data) == [] and _sandboxes(data) == []
    assert not (data / "demo" / "sockets").exists() and not begun.exists()


def test_up_serves_the_other_commands_and_refuses_a_second_one(data, tmp_path):
    p = start("up", data=data)
    config = data / "polar.toml"
    try:
        until(lambda: (config.exists() and 'api_url = "http' in config.read_text()) or p.poll() is not None, 120)
        assert p.poll() is None, p.communicate()[1]
        second = start("up", data=data)
        assert second.wait(30) == 1 and "already" in second.communicate()[1]
        task = tmp_path / "task.yaml"
        evaluator = "{name: test_on_output, config: {command: grep done answer.txt, collect: [answer.txt]}}"
        agent = "{harness: shell, command: echo done > answer.txt}"
        task.write_text(f"instruction: hi\nnum_samples: 2\nagent: {agent}\nevaluator: {evaluator}\n")
        run = polar("run", str(task), "--json", config=config)
        assert run["passed"] == run["sessions"] == 2
        (name,) = run["tasks"]
        assert polar("results", "pull", name, str(tmp_path / "r.jsonl"), "--json", config=config)["results"] == 2
        lines = (tmp_path / "r.jsonl").read_text().splitlines()
        assert {json.loads(x)["session_id"] for x in lines} == {f"{name}.s0", f"{name}.s1"}
        assert polar("results", "show", f"{name}.s0", "--json", config=config)["reward"] == 1.0
        task.write_text("task_id: long\ninstruction: hi\nagent: {harness: shell, command: sleep 602}\n")
        assert polar("submit", str(task), "--json", config=config) == {"tasks": {"long": ["long.s0"]}}
        assert polar("cancel", "long", "--json", config=config)["cancelled"].keys() == {"long.s0"}
        until(lambda: polar("status", "long", "--json", config=config)["done"] == 1, 60)
        status = polar("status", "--json", config=config)
        assert status["backlog"]["open"] == 0 and len(status["nodes"]) == 1
        assert polar("doctor", "--json", config=config)["ok"] is True
        at = one_call(config)
        # Every part is killed; all come back, and where they were.
        urls = [(data / f"{name}.url").read_text().strip() for name in ("engine", "proxy", "api")]
        before = processes_of(p)
        assert len(before) == 8 and all(url in config.read_text() for url in urls)
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        until(lambda: len(now := processes_of(p)) == 8 and not now & before, 60)
        until(lambda: all(map(answers, urls)), 120)
        task.write_text(f"instruction: hi\nnum_samples: 2\nagent: {agent}\nevaluator: {evaluator}\n")
        assert polar("run", str(task), "--json", config=config)["passed"] == 2
        assert one_call(config) == at
        assert p.poll() is None
    finally:
        p.send_signal(signal.SIGTERM)
        _, err = p.communicate(timeout=60)
    assert p.returncode == 0, err
    assert children_of(data) == [] and not config.exists()


@pytest.mark.slow
def test_up_is_not_ready_with_workers_that_keep_ending(data, tmp_path):
    (tmp_path / "celery.py").write_text("raise SystemExit('celery is broken here')\n")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    p = start("up", data=data, PYTHONPATH=path)
    _, err = p.communicate(timeout=240)
    assert p.returncode == 1 and "celery is broken here" in err and "worker-" in err and "ready:" not in err, err
    assert children_of(data) == []


def one_call(config: Path) -> str:
    """A capture-only session with one call; the proxy's address."""
    opened = polar("session", "open", "--json", config=config)
    client = OpenAI(base_url=opened["base_url"] + "/v1", api_key=opened["api_key"], max_retries=0)
    reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}], max_tokens=8)
    closed = polar("session", "close", opened["session"], "--json", config=config)
    assert closed["usage"]["turns"] == 1
    assert closed["trajectory"]["fidelity"]["trace_tokens"] == reply.usage.completion_tokens
    return opened["base_url"].partition("/s/")[0]


def processes_of(parent: subprocess.Popen) -> set[int]:
    """Its children, whichever of its threads started them."""
    files = Path(f"/proc/{parent.pid}/task").glob("*/children")
    return {int(pid) for f in files for pid in f.read_text().split()}


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def polar(*args: str, config: Path) -> dict:
    r = subprocess.run([*POLAR, *args, "--config", str(config)], capture_output=True, text=True, timeout=120)
    assert r.returncode == 0, r.stderr
    return json.loads(r.stdout.splitlines()[-1])


def _sandboxes(data: Path) -> list[Path]:
    return list((data / "demo" / "sandboxes").glob("*"))
