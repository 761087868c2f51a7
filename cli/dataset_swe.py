"""Instances of SWE-bench, SWE-Gym and SWE-smith as tasks."""

from __future__ import annotations

import importlib
import pkgutil
import re
import shlex
from dataclasses import dataclass, field
from typing import Any

from cli.dataset_rows import Row, text, texts
from evaluators.history import hide_future
from evaluators.swe_config import patched
from polar.errors import InvalidTask

IMAGES = {
    "swebench": "swebench/sweb.eval.x86_64.{id_1776}:latest",
    "swegym": "xingyaoww/sweb.eval.x86_64.{id_s}:latest",
    "swesmith": "{image}",
}
# Seconds of one run of the tests, and of judging: time for five of them, as many as the evaluator reckons with by default,
# and for their sandboxes.
RUN_SECONDS, JUDGING_SECONDS = 600, 3600
DEFAULT_COMMAND = "python -m pytest -rA -p no:cacheprovider {test_files}"
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
# Files that a test command is not given.
_NO_TESTS = (".json", ".png", ".csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml", ".cfg", ".ini")


@dataclass
class Instance:
    """A task as plain data, and what shows that it can be solved: a patch, or a script for the agent's sandbox."""

    name: str
    task: dict[str, Any]
    gold: str = ""
    gold_script: str = ""
    notes: list[str] = field(default_factory=list)


@dataclass
class Rules:
    """How rows become tasks. `repo`: the repository's folder in the images."""

    kind: str
    image: str = ""
    repo: str = "/testbed"
    command: str = ""
    parser: str = ""


def image_name(template: str, row: Row, where: str) -> str:
    name = text(row, "instance_id", where)
    owner, _, repo = text(row, "repo", where, "").rpartition("/")
    words = {
        "instance_id": name, "id_lower": name.lower(), "id_1776": name.replace("__", "_1776_").lower(),
        "id_s": name.replace("__", "_s_").lower(), "owner": owner, "repo": repo, "version": str(row.get("version") or ""),
        "image": row.get("image") or row.get("image_name") or row.get("docker_image") or "",
    }  # fmt: skip
    try:
        found = template.format_map(words)
    except (KeyError, ValueError, IndexError) as e:
        allowed = ", ".join("{" + w + "}" for w in words)
        raise InvalidTask(f"--image-template: unknown placeholder {e}; allowed: {allowed}") from e
    if not found:
        raise InvalidTask(f"{where}: the row names no image; give --image-template")
    return found


def convert(row: Row, rules: Rules, where: str) -> Instance:
    name = text(row, "instance_id", where)
    smith = rules.kind == "swesmith"
    template = rules.image or ("{image}" if row.get("image") or row.get("image_name") else IMAGES[rules.kind])
    test_patch, given = text(row, "test_patch", where, ""), text(row, "patch", where, "")
    f2p, p2p = texts(row, "FAIL_TO_PASS", where), texts(row, "PASS_TO_PASS", where)
    if not f2p:
        raise InvalidTask(f"{where}: FAIL_TO_PASS: names no test")
    command, notes = _command(row, rules, test_patch, [*f2p, *p2p], where)
    config: dict[str, Any] = {
        "instance_id": name, "repo": rules.repo, "test_command": command, "fail_to_pass": f2p,
        "pass_to_pass": [t for t in p2p if t not in f2p], "test_patch": test_patch, "report": _report(row, rules, name),
        "timeout_seconds": RUN_SECONDS,
    }  # fmt: skip
    if not smith and row.get("base_commit"):
        config["base_commit"] = text(row, "base_commit", where)
    prepare: list[dict[str, Any]] = []
    if smith:
        prepare += _bug(given, rules.repo)
    hide = {"type": "exec", "command": hide_future(rules.repo)}
    image = image_name(template, row, where)
    # The judge has nobody to hide the history from, and packing a large one takes its time.
    runtime = {"image": image, "workdir": rules.repo, "prepare": [*prepare, hide], "evaluation_prepare": prepare}
    task = {
        "instruction": text(row, "problem_statement", where),
        "runtime": runtime,
        "evaluator": {"name": "swe", "config": config},
        "evaluation_timeout_seconds": JUDGING_SECONDS,
        "metadata": {"dataset": rules.kind, "instance_id": name, "repo": text(row, "repo", where, "")},
    }
    return Instance(name, task, gold=_reversed(given) if smith else given, notes=notes)


def _bug(diff: str, repo: str) -> list[dict[str, Any]]:
    """The patch makes the bug; history would show what was there before."""
    q, file = shlex.quote(repo), "/tmp/polar-instance.diff"
    git = "git -c user.name=polar -c user.email=polar@localhost -c core.hooksPath=/dev/null"
    commit = f"cd {q} && git apply {file} && rm {file} && {git} checkout -q --orphan start && {git} commit -qam start"
    return [{"type": "upload_file", "target": file, "content": diff}, {"type": "exec", "command": commit}]


def _reversed(diff: str) -> str:
    """Marks a patch that is to be applied backwards."""
    return f"# reverse\n{diff}" if diff else ""


def _command(row: Row, rules: Rules, test_patch: str, tests: list[str], where: str) -> tuple[str, list[str]]:
    files = [f for f in patched(test_patch) if not f.endswith(_NO_TESTS)]
    if not files:
        files = sorted({t.partition("::")[0] for t in tests if "::" in t})
    words = " ".join(shlex.quote(f) for f in files)
    if rules.command:
        return rules.command.replace("{test_files}", words), []
    script = row.get("eval_script") or row.get("eval_sh")
    if isinstance(script, list):
        script = "\n".join(script)
    if isinstance(script, str) and _START in script:
        return bash(_from_script(script)), []
    given = row.get("test_cmd") or row.get("test_command") or _package_command(row)
    if isinstance(given, list):
        given = " && ".join(given)
    if given:
        given = str(given)
        return bash(
            _ACTIVATE + (given.replace("{test_files}", words) if "{test_files}" in given else f"{given} {words}")
        ), []
    if not files:
        raise InvalidTask(f"{where}: no test command in the row and no test file to run; give --test-command")
    return bash(_ACTIVATE + DEFAULT_COMMAND.replace("{test_files}", words)), ["test command by default: pytest"]


# Images of these data sets keep their interpreter in a conda environment.
_ACTIVATE = "[ ! -f /opt/miniconda3/bin/activate ] || . /opt/miniconda3/bin/activate testbed; "


def bash(script: str) -> str:
    return f"bash -c {shlex.quote(script)}"


def _from_script(script: str) -> str:
    """An instance's own evaluation script without what the evaluator does itself: tests of the base commit, test patch."""
    out, here = [], ""
    for line in script.split("\n"):
        if here:
            here = "" if line.strip() == here else here
            continue
        if m := re.match(r"\s*git apply\b.*<<\s*'?\"?(\w+)", line):
            here = m[1]
        elif not re.match(r"\s*git (checkout|apply)\b", line):
            out.append(line)
    return "\n".join(out)


def _package_command(row: Row) -> Any:
    """Test commands by repository and version, which older releases of the package have."""
    try:
        constants = importlib.import_module("swebench.harness.constants")
        return constants.MAP_REPO_VERSION_TO_SPECS[row.get("repo")][str(row.get("version"))]["test_cmd"]
    except (ImportError, AttributeError, KeyError):
        return None


def _report(row: Row, rules: Rules, name: str) -> dict[str, Any]:
    parser = rules.parser or row.get("log_parser") or _package_parser(row.get("repo"))
    if not parser or parser == "pytest":
        return {"kind": "pytest"}
    report = {"kind": "swebench", "parser": parser, "version": str(row.get("version") or ""), "instance_id": name}
    return report | ({"eval_type": row["eval_type"]} if row.get("eval_type") else {})


def _package_parser(repo: Any) -> str:
    """The parser that the package has for a repository; empty without one."""
    try:
        package = importlib.import_module("swebench.harness.log_parsers")
    except ImportError:
        return ""
    by_function = {id(f): n for n, f in package.PARSER_REGISTRY.items()}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for known in (v for k, v in vars(module).items() if k.startswith("MAP_REPO_TO_PARSER")):
            if repo in known:
                return by_function.get(id(known[repo]), "")
    return ""
