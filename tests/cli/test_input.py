"""Wrong input: one clear line, exit code 2, nothing enqueued."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli.stack import toml
from polar.codec import convert
from polar.config import Settings
from polar.task import TaskRequest

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
    s = Settings(broker=f"unix://{tmp_path}/nobody", data_dir=str(tmp_path), proxy_url="http://127.0.0.1:9")
    path.write_text(toml(msgspec.to_builtins(s)))
    r = subprocess.run(
        [sys.executable, "-m", "cli.main", *command, "--config", str(path)], capture_output=True, text=True
    )
    assert r.returncode == 3 and "polar doctor" in r.stderr and len(r.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("stages", "code"), [(["init"], 2), (["postrun", "run"], 2), (["postrun"], 3), (["reaper"], 3)]
)
def test_a_node_whose_agents_could_reach_no_model_does_not_start(tmp_path, stages, code):
    env = {k: v for k, v in os.environ.items() if not k.startswith("POLAR_")}
    env |= {"POLAR_BROKER": f"unix://{tmp_path}/nobody", "POLAR_PROXY_SOCKET": f"{tmp_path}/sock"}
    r = subprocess.run(
        [sys.executable, "-m", "cli.main", "worker", *stages, "--node", "b"],
        capture_output=True, text=True, env=env | {"POLAR_DATA_DIR": str(tmp_path)}, cwd=tmp_path, timeout=60,
    )  # fmt: skip
    assert r.returncode == code and len(r.stderr.splitlines()) == 1, r.stderr
    named = "proxy_url" in r.stderr and "POLAR_PROXY_URL" in r.stderr
    assert named == (code == 2), "the others got as far as the broker, which isn't there"


@pytest.mark.parametrize(
    ("command", "bound"),
    [
        (["submit", "task.json", "--samples", "5000"], "4096"),
        (["submit", "task.json", "--samples", "0"], "1"),
        (["session", "open", "--timeout", "700000"], "604800"),
        (["session", "open", "--timeout", "nan"], "604800"),
    ],
)
def test_what_no_task_can_have_is_refused_by_the_options_name(store, config, command, bound):
    with config.open("a") as f:
        f.write('proxy_url = "http://127.0.0.1:9"\n')
    (config.parent / "task.json").write_bytes(msgspec.json.encode(GOOD))
    r = subprocess.run(
        [sys.executable, "-m", "cli.main", *command, "--config", str(config)],
        capture_output=True, text=True, cwd=config.parent, timeout=60,
    )  # fmt: skip
    assert r.returncode == 2 and len(r.stderr.splitlines()) == 1, r.stderr
    assert f"'{command[-2]}'" in r.stderr and bound in r.stderr
    assert store.task_ids() == []


def test_cancel_ends_what_is_there_and_names_what_is_not(store, config):
    tasks = [convert(GOOD | {"task_id": name, "num_samples": 2}, TaskRequest, name) for name in ("good", "late")]
    store.submit_all([(t, "local") for t in tasks])
    command = [sys.executable, "-m", "cli.main", "cancel", "--config", str(config)]
    r = subprocess.run([*command, "good", "bad", "late.s1"], capture_output=True, text=True, timeout=60)
    assert r.returncode == 4 and "no task or session 'bad'" in r.stderr
    assert r.stdout.splitlines() == ["good.s0: was PENDING", "good.s1: was PENDING", "late.s1: was PENDING"]
    states = {s.session_id: s.state for t in ("good", "late") for s in store.task_status(t).sessions}
    assert states == {"good.s0": "POSTRUN", "good.s1": "POSTRUN", "late.s0": "PENDING", "late.s1": "POSTRUN"}
    overdue = {s.session_id for s in store.overdue_hints(60)}
    assert overdue == {"good.s0", "good.s1", "late.s1"}, "the reaper announces them in its next round"
    r = subprocess.run([*command, "late", "worse", "--json"], capture_output=True, text=True, timeout=60)
    assert r.returncode == 4 and msgspec.json.decode(r.stdout) == {
        "cancelled": {"late.s0": "PENDING", "late.s1": "POSTRUN"}, "missing": ["worse"]
    }  # fmt: skip


def test_two_stacks_on_one_machine_have_two_node_names(tmp_path):
    from cli.stack import Stack

    a, again, b = (Stack(Settings(data_dir=str(tmp_path / n))) for n in "aab")
    assert a.node == again.node != b.node
    for stack in (a, again, b):
        stack.stop()
