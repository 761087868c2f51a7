"""Wrong input: one clear line, exit code 2, nothing enqueued."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli.stack import toml
from polar.config import Settings

GOOD = {"instruction": "hi", "agent": {"harness": "shell", "command": "true"}}


@pytest.fixture
def config(store, redis_url, tmp_path) -> Path:
    path = tmp_path / "polar.toml"
    path.write_text(toml(msgspec.to_builtins(Settings(broker=redis_url, namespace="t", data_dir=str(tmp_path)))))
    return path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"agnt": {}}, "agnt: unknown field; allowed: agent,"),
        ({"timeout_seconds": -5}, "timeout_seconds: found -5, allowed: number > 0"),
        (
            {"agent": {"harness": "nothing"}},
            "unknown name 'nothing'; allowed: claude_code, codex, gemini_cli, mini_swe_agent, opencode, pi, qwen_code, shell",
        ),
        ({"runtime": {"backend": "docker"}}, "runtime.image"),
        ({"runtime": {"backend": "vmware"}}, "unknown name 'vmware'; allowed: apptainer, docker, local"),
        ({"runtime": {"backend": "local", "image": "x"}}, "runtime.image"),
        ({"runtime": {"prepare": [{"type": "upload_dir", "source": "nowhere", "target": "/work"}]}}, "no such folder"),
        ({"runtime": {"volumes": [{"source": "/etc", "target": "/x"}]}}, "runtime.volumes"),
        ({"builder": {"strategy": "magic"}}, "unknown name 'magic'; allowed: exact, per_request, prefix_merging, tree"),
        ({"builder": {"strategy": "prefix_merging", "config": {"eot": 1}}}, "builder.config.eot"),
        ({"evaluator": {"name": "test_on_output", "config": {}}}, "evaluator.config: command: missing"),
        ({"num_samples": 0}, "num_samples: found 0"),
    ],
)
def test_a_wrong_task_is_refused_whole(store, config, tmp_path, change, says):
    file = tmp_path / "tasks.json"
    file.write_bytes(msgspec.json.encode([GOOD, GOOD | change]))
    r = subprocess.run(
        [sys.executable, "-m", "cli.main", "submit", str(file), "--config", str(config)], capture_output=True, text=True
    )
    assert r.returncode == 2, r.stderr
    assert says in r.stderr and len(r.stderr.splitlines()) == 1
    assert store.backlog()["open"] == 0 and store.task_ids() == []


def test_no_deployment_and_no_file(tmp_path):
    r = subprocess.run([sys.executable, "-m", "cli.main", "status"], capture_output=True, text=True, cwd=tmp_path)
    assert r.returncode == 2 and "polar up" in r.stderr


@pytest.mark.parametrize("command", [["status"], ["results", "list"], ["worker", "init"]])
def test_a_dead_broker_is_one_line_and_exit_code_3(tmp_path, command):
    path = tmp_path / "polar.toml"
    path.write_text(toml(msgspec.to_builtins(Settings(broker=f"unix://{tmp_path}/nobody", data_dir=str(tmp_path)))))
    r = subprocess.run(
        [sys.executable, "-m", "cli.main", *command, "--config", str(path)], capture_output=True, text=True
    )
    assert r.returncode == 3 and "polar doctor" in r.stderr and len(r.stderr.splitlines()) == 1


def test_two_stacks_on_one_machine_have_two_node_names(tmp_path):
    from cli.stack import Stack

    a, again, b = (Stack(Settings(data_dir=str(tmp_path / n))) for n in "aab")
    assert a.node == again.node != b.node
    for stack in (a, again, b):
        stack.stop()
