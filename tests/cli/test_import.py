"""`polar tasks import`: rows and folders to task files that a deployment takes, and the dry run that finds bad instances."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from cli import dataset_rows
from cli.datasets import app
from polar.codec import load_file
from polar.errors import InvalidTask
from polar.task import Exec, TaskRequest
from tests.evaluators.repos import PYTHON, REPO, diff, no_local_python

RUNNER = CliRunner()
ROW = {
    "instance_id": "acme__words-7",
    "repo": "acme/words",
    "problem_statement": "Slugs are wrong.",
    "patch": diff(PYTHON.files, PYTHON.gold),
    "test_patch": PYTHON.test_patch(),
    "FAIL_TO_PASS": json.dumps(PYTHON.fail_to_pass),
    "PASS_TO_PASS": PYTHON.pass_to_pass,
    "version": "1.0",
    "hints_text": "unused",
}


def rows(tmp_path: Path, *changes: dict) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(ROW | c) + "\n" for c in changes or [{}]))
    return path


def template(tmp_path: Path, **more) -> Path:
    """A task in which the repository is made by prepare steps, for sandboxes without images."""
    path = tmp_path / "template.json"
    base = {
        "agent": {"harness": "shell", "command": "true"},
        "runtime": {"prepare": msgspec.to_builtins(PYTHON.prepare())},
    }
    path.write_text(json.dumps(base | more))
    return path


def run(*arguments: object):
    return RUNNER.invoke(app, ["import", *map(str, arguments)])


def imported(tmp_path: Path, *arguments: object) -> list[TaskRequest]:
    r = run(*arguments, "--out", tmp_path / "out")
    assert r.exit_code == 0, (r.output, r.exception)
    return [t for p in sorted((tmp_path / "out").glob("*.json")) for t in load_file(p, TaskRequest)]


def test_a_row_becomes_a_task_file(tmp_path):
    (task,) = imported(tmp_path, rows(tmp_path, {"base_commit": "abc1234"}), "--runtime", "docker")
    assert task.task_id == "acme__words-7" and task.instruction == "Slugs are wrong."
    assert task.runtime.image == "swebench/sweb.eval.x86_64.acme_1776_words-7:latest"
    config = task.evaluator.config
    assert config["fail_to_pass"] == PYTHON.fail_to_pass and config["base_commit"] == "abc1234"
    assert "tests/test_words.py" in config["test_command"] and config["report"] == {"kind": "pytest"}
    assert any(isinstance(p, Exec) and "for-each-ref" in p.command for p in task.runtime.prepare)
    gold = (tmp_path / "out" / "gold" / "acme__words-7.patch").read_text()
    assert (
        gold == ROW["patch"]
        and "text.lower().split())" in gold
        and "text.lower().split())" not in json.dumps(msgspec.to_builtins(task))
    )


def test_images_by_template_and_by_row(tmp_path):
    a, b = rows(tmp_path), ["--runtime", "docker"]
    assert (
        imported(tmp_path, a, "--image-template", "r/{owner}.{repo}:{instance_id}", *b)[0].runtime.image
        == "r/acme.words:acme__words-7"
    )
    assert (
        imported(tmp_path, a, "--format", "swegym", *b)[0].runtime.image
        == "xingyaoww/sweb.eval.x86_64.acme_s_words-7:latest"
    )
    assert (
        imported(tmp_path, rows(tmp_path, {"image_name": "smith/x"}), "--format", "swesmith", *b)[0].runtime.image
        == "smith/x"
    )


EVAL = """#!/bin/bash
source /opt/miniconda3/bin/activate
cd /testbed
git checkout abc tests/test_words.py
git apply -v - <<'EOF_1'
diff --git a/x b/x
EOF_1
: '>>>>> Start Test Output'
pytest -rA tests/test_words.py
: '>>>>> End Test Output'
git checkout abc tests/test_words.py
"""


def test_an_instances_own_script_and_parser(tmp_path):
    pytest.importorskip("swebench", reason="the extra 'swe' is not installed")
    (task,) = imported(tmp_path, rows(tmp_path, {"eval_script": EVAL, "repo": "django/django"}), "--runtime", "docker")
    command = task.evaluator.config["test_command"]
    assert "git apply" not in command and "git checkout" not in command and "pytest -rA tests/test_words.py" in command
    assert task.evaluator.config["report"]["parser"] == "parse_log_django"


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="the extra 'swe' is not installed")
    import pyarrow.parquet as parquet

    path = tmp_path / "data.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([ROW, ROW | {"instance_id": "acme__words-8"}]), path)
    assert [t.task_id for t in imported(tmp_path, path, "--runtime", "docker")] == ["acme__words-7", "acme__words-8"]
    assert len(imported(tmp_path, path, "--runtime", "docker", "--only", "acme__words-8")) >= 1


def test_parquet_without_pyarrow_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidTask, match="pyarrow"):
        list(dataset_rows.read(tmp_path / "x.parquet"))


@pytest.mark.parametrize(
    ("change", "arguments", "says"),
    [
        ({"FAIL_TO_PASS": "[]"}, [], "FAIL_TO_PASS: names no test"),
        ({"FAIL_TO_PASS": [1]}, [], "FAIL_TO_PASS: a list of texts"),
        ({"problem_statement": None}, [], "problem_statement: a text is needed, found nothing"),
        ({}, ["--image-template", "{nothing}"], "--image-template: unknown placeholder 'nothing'"),
        ({}, ["--only", "other"], "--only: no instance 'other'"),
        ({}, ["--log-parser", "parse_log_nothing"], "parse_log_nothing"),
    ],
)
def test_what_is_wrong_is_named(tmp_path, change, arguments, says):
    r = run(rows(tmp_path, change), "--out", tmp_path / "out", "--runtime", "docker", *arguments)
    assert isinstance(r.exception, InvalidTask) and says in r.exception.message
    assert not (tmp_path / "out").exists()


def test_the_command_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{}\n{")
    argv = [
        sys.executable,
        "-m",
        "cli.main",
        "tasks",
        "import",
        str(tmp_path / "bad.jsonl"),
        "--out",
        str(tmp_path / "o"),
    ]
    r = subprocess.run(argv, capture_output=True, text=True)
    assert r.returncode == 2 and "bad.jsonl:2: not valid JSON" in r.stderr and len(r.stderr.splitlines()) == 1


@pytest.fixture
def local(tmp_path):
    if why := no_local_python():
        pytest.skip(why)
    config = tmp_path / "polar.toml"
    config.write_text(f'data_dir = "{tmp_path}/data"\n')
    return ["--runtime", "local", "--config", config, "--out", tmp_path / "out", "--check", "--json"]


def test_the_dry_run_finds_instances_that_do_not_hold(tmp_path, local):
    command = ["--test-command", PYTHON.command.replace("{python}", sys.executable), "--repo", REPO]
    gold_breaks = {"instance_id": "breaks", "patch": diff(PYTHON.files, PYTHON.breaking)}
    passes_anyway = {"instance_id": "vacuous", "FAIL_TO_PASS": PYTHON.pass_to_pass[:1], "PASS_TO_PASS": []}
    no_gold = {"instance_id": "unpatchable", "patch": "garbage\n"}
    file = rows(tmp_path, {}, gold_breaks, passes_anyway, no_gold)
    r = run(file, *local, *command, "--template", template(tmp_path))
    assert r.exit_code == 1, (r.output, r.exception)
    found = {c["instance"]: c for c in json.loads(r.stdout.splitlines()[-1])["checks"]}
    assert (found["acme__words-7"]["gold"], found["acme__words-7"]["empty"]) == ("passed", "failed")
    assert found["breaks"]["gold"] == "failed" and "test_count" in found["breaks"]["message"]
    assert found["vacuous"]["empty"] == "passed" and not found["vacuous"]["good"]
    assert found["unpatchable"]["gold"] == "gold_failed"


def test_bugs_by_patch(tmp_path, local):
    """SWE-smith: the image has the right code, the instance's patch breaks it."""
    right = {**PYTHON.files, **PYTHON.gold, **PYTHON.tests}
    prepare = [{"type": "upload_file", "target": f"{REPO}/{p}", "content": c} for p, c in right.items()]
    git = "git -c user.name=t -c user.email=t@t"
    prepare.append({"type": "exec", "command": f"cd {REPO} && git init -q . && {git} add -A && {git} commit -qm x"})
    row = {"patch": diff(PYTHON.gold, {"src/words.py": PYTHON.files["src/words.py"]}), "test_patch": ""}
    file, base = rows(tmp_path, row), template(tmp_path, runtime={"prepare": prepare})
    command = [
        "--test-command",
        PYTHON.command.replace("{python}", sys.executable),
        "--repo",
        REPO,
        "--format",
        "swesmith",
    ]
    r = run(file, *local, *command, "--template", base, "--image-template", "x")
    assert r.exit_code == 0, (r.output, r.exception)


def harbor(tmp_path: Path, toml: str = "") -> Path:
    folder = tmp_path / "set" / "hello"
    for name, content in {
        "task.toml": f'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[environment]\nmemory = "2G"\n{toml}',
        "instruction.md": "Write 42.\n",
        "environment/Dockerfile": "FROM x\nWORKDIR /repo\n",
        "solution/solve.sh": "echo 42 >/repo/answer.txt\n",
        "tests/test.sh": 'if [ "$(cat /repo/answer.txt)" = 42 ]; then r=1; else r=0; fi; echo $r >/logs/verifier/reward.txt\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder.parent


def test_harbor_folders(tmp_path):
    (task,) = imported(
        tmp_path, harbor(tmp_path), "--format", "harbor", "--image-template", "h/{folder}", "--runtime", "docker"
    )
    assert (task.runtime.image, task.runtime.workdir, task.runtime.memory_mb) == ("h/hello", "/repo", 2048)
    assert task.runtime.prepare == [] and task.evaluator.runtime.evaluation_prepare[0].target == "/tests"
    assert task.evaluator.config["timeout_seconds"] == 60.0 and task.instruction == "Write 42.\n"
    r = run(harbor(tmp_path), "--format", "harbor", "--runtime", "docker", "--out", tmp_path / "o2")
    assert "docker_image" in r.exception.message


def test_harbor_checked(tmp_path, local):
    # A local sandbox has no memory limit to give.
    source = harbor(tmp_path)
    toml = source / "hello" / "task.toml"
    toml.write_text(toml.read_text().replace('memory = "2G"', ""))
    base = template(tmp_path, runtime={"prepare": [{"type": "exec", "command": "mkdir -p /repo"}]})
    r = run(source, "--format", "harbor", *local, "--image-template", "x", "--template", base)
    assert r.exit_code == 0, (r.output, r.exception)


def test_the_future_is_gone(tmp_path):
    from evaluators.history import hide_future

    git = "git -c user.name=t -c user.email=t@t"
    make = f"""mkdir -p {tmp_path}/r && cd {tmp_path}/r && git init -qb main . && echo a >f && git add f && {git} commit -qm base &&
        git checkout -qb fix && echo fixed >f && {git} commit -qam fix && git tag v2 && git checkout -q main && echo dirty >g &&
        git add g && {git} stash -q && git remote add origin /nowhere &&
        git update-ref refs/remotes/origin/fix fix && {git} pack-refs --all"""
    look = f"""cd {tmp_path}/r && git rev-list --all --reflog | wc -l && git log --oneline | wc -l &&
        git fsck --lost-found && git remote && git status --short"""
    subprocess.run(["bash", "-c", make], check=True)
    subprocess.run(["sh", "-c", hide_future(f"{tmp_path}/r")], check=True)
    shown = subprocess.run(["bash", "-c", look], check=True, capture_output=True, text=True).stdout.split()
    assert shown == ["1", "1"]
    objects = subprocess.run(
        ["git", "-C", f"{tmp_path}/r", "cat-file", "--batch-all-objects", "--batch-check"],
        capture_output=True,
        text=True,
    )
    assert len(objects.stdout.splitlines()) == 3  # one commit, its tree, its file


def test_the_templates_time_limits_win(tmp_path):
    def limits(**more) -> tuple[float, float]:
        base = template(tmp_path, **more)
        (task,) = imported(tmp_path, rows(tmp_path), "--runtime", "docker", "--template", base)
        return task.evaluation_timeout_seconds, task.evaluator.config["timeout_seconds"]

    assert limits() == (3600, 600)
    own = {"config": {"timeout_seconds": 50}}
    assert limits(evaluation_timeout_seconds=100, evaluator=own) == (100, 50)
