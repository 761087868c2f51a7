"""Task folders of Harbor (and of Terminal-Bench in that format) as tasks."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

from cli.dataset_swe import Instance
from polar.errors import InvalidTask

_UNITS = {"": 1, "M": 1, "MB": 1, "MIB": 1, "G": 1024, "GB": 1024, "GIB": 1024}


def folders(path: Path) -> list[Path]:
    """The task folders at or right below `path`, or in data sets one level further down."""
    found = (
        [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.glob("**/task.toml") if p.is_file())
    )
    if not found:
        raise InvalidTask(f"{path}: no folder with a task.toml in it")
    return found


def convert(folder: Path, image: str) -> Instance:
    where = str(folder / "task.toml")
    try:
        config = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InvalidTask(f"{where}: {e}") from e
    for needed in ("instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise InvalidTask(f"{folder}: {needed}: missing")
    environment, verifier, agent = (_table(config, k, where) for k in ("environment", "verifier", "agent"))
    name = str(_table(config, "task", where).get("name") or folder.name).replace("/", "__")
    notes: list[str] = []
    spec = _runtime(folder, environment, image, name, notes)
    test_env = {k: v for k, v in (verifier.get("env") or {}).items() if "${" not in str(v)}
    if left := sorted(set(verifier.get("env") or {}) - set(test_env)):
        notes.append(f"verifier.env left out, set it in the template: {', '.join(left)}")
    # Its tests often fetch their own tools; only the agent's sandbox is closed by default.
    judged = spec | {"network": "none" if environment.get("allow_internet") is False else "internet"}
    judged["evaluation_prepare"] = [
        {"type": "upload_dir", "source": str((folder / "tests").resolve()), "target": "/tests"}
    ]
    evaluator: dict[str, Any] = {"name": "harbor", "config": {"env": test_env} if test_env else {}, "runtime": judged}
    task: dict[str, Any] = {
        "instruction": (folder / "instruction.md").read_text(encoding="utf-8"),
        "runtime": spec,
        "evaluator": evaluator,
        "metadata": {"dataset": "harbor", "instance_id": name},
    }
    if seconds := verifier.get("timeout_sec"):
        evaluator["config"]["timeout_seconds"] = float(seconds)
        task["evaluation_timeout_seconds"] = 2 * float(seconds) + 300
    if seconds := agent.get("timeout_sec"):
        task["agent_timeout_seconds"] = float(seconds)
        task["timeout_seconds"] = float(seconds) + 600
    solve = folder / "solution" / "solve.sh"
    script = solve.read_text(encoding="utf-8") if solve.is_file() else ""
    return Instance(name, task, gold_script=script, notes=notes)


def _runtime(folder: Path, environment: dict[str, Any], image: str, name: str, notes: list[str]) -> dict[str, Any]:
    try:
        found = image.format_map({"name": name, "folder": folder.name, "image": environment.get("docker_image") or ""})
    except (KeyError, ValueError, IndexError) as e:
        raise InvalidTask(f"--image-template: unknown placeholder {e}; allowed: {{name}}, {{folder}}, {{image}}") from e
    found = found or environment.get("docker_image") or ""
    if not found:
        raise InvalidTask(
            f"{folder}: its task.toml names no docker_image: build environment/Dockerfile and give --image-template"
        )
    spec: dict[str, Any] = {"image": found}
    dockerfile = folder / "environment" / "Dockerfile"
    workdirs = (
        re.findall(r"^\s*WORKDIR\s+(/\S*)", dockerfile.read_text(encoding="utf-8"), re.M)
        if dockerfile.is_file()
        else []
    )
    if workdirs:
        spec["workdir"] = workdirs[-1]
    if cpus := environment.get("cpus"):
        spec["cpus"] = float(cpus)
    if memory := environment.get("memory_mb") or _megabytes(environment.get("memory")):
        spec["memory_mb"] = int(memory)
    if gpus := environment.get("gpus"):
        spec["gpus"] = int(gpus)
    if environment.get("allow_internet") is True:
        spec["network"] = "internet"
    if (folder / "environment" / "docker-compose.yaml").is_file():
        notes.append("environment/docker-compose.yaml: only its main image is used")
    return spec


def _table(config: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    value = config.get(key, {})
    if not isinstance(value, dict):
        raise InvalidTask(f"{where}: {key}: a table is needed")
    return value


def _megabytes(value: Any) -> int | None:
    m = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", str(value or ""))
    return int(m[1]) * _UNITS[m[2].upper()] if m and m[2].upper() in _UNITS else None


def solution(instance: Instance) -> str:
    return f"bash -c {shlex.quote(instance.gold_script)}"
