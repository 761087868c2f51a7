"""`swe` over a small repository in real sandboxes: whose fault a crash is, re-runs, patch files, and what is believed."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable

import pytest
from folder_sandbox import outcome
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from evaluators import patch
from evaluators.patch import Patch
from evaluators.reports import Status
from evaluators.swe import Swe
from evaluators.swe_config import load, patched
from evaluators.swe_grading import grade
from polar.config import Settings
from polar.errors import EvaluatorError, InvalidTask
from polar.judge import Changes
from polar.result import Evaluation
from polar.task import RuntimeSpec
from runtimes.local import LocalRuntime
from runtimes.prepare import run_prepare
from tests.evaluators.repos import PYTHON, REPO, diff, no_local_python, writes

GOLD, HALF = writes(PYTHON.gold), writes(PYTHON.half)


@pytest.fixture
def judge(tmp_path):
    """Judge what a command makes of the repository; `fresh` is run in each of the judge's sandboxes first."""
    if why := no_local_python():
        pytest.skip(why)
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path / "data")))
    made = []

    def make():
        spec = RuntimeSpec(backend="local", options={"isolation": "bwrap"}, workdir=REPO)
        made.append(runtime.create(spec, labels={"t": "t"}, proxy=None, timeout=60))
        run_prepare(made[-1], PYTHON.prepare(), timeout=60, fetch=lambda p: p)
        return made[-1]

    def judge(
        work: str, fresh: Callable[[], str] = lambda: "true", budget: float = 600, left: float = 60, **config
    ) -> Evaluation:
        agent = make()
        baseline = agent.baseline(REPO)
        assert agent.exec(work, timeout=60).exit_code == 0
        agent.stop()
        source = config.get("patch", {}).get("source", "changes")
        artifacts = {}
        if source != "changes":
            agent.download(source, tmp_path / "artifact", limit=1 << 24)
            artifacts[source] = tmp_path / "artifact"
        agent.changes(tmp_path / "c.tar", under=REPO, baseline=baseline, limit=1 << 24)
        evaluator = Swe.from_config(PYTHON.config(sys.executable, **config))
        assert (evaluator.changes_under, evaluator.collects) in ((REPO, ()), (None, (source,)))

        def another():
            box = make()
            assert box.exec(fresh(), timeout=60).exit_code == 0
            return box

        first = another()
        o = outcome(tmp_path, first, artifacts=artifacts, seconds=left)
        o.task = replace(o.task, evaluation_timeout_seconds=budget)
        o.changes, o.another = Changes(under=REPO, archive=tmp_path / "c.tar"), another
        return evaluator.evaluate(o)

    judge.logs = tmp_path / "logs"
    yield judge
    for box in made:
        box.destroy()


def test_the_report_tells_all_runs(judge):
    e = judge(GOLD)
    assert (e.verdict, e.outcome_reward, e.report["resolved"]) == ("passed", 1.0, True)
    assert [r["run"] for r in e.report["runs"]] == ["tests", "control1", "control2"]
    assert e.report["controls"] == {"trials": 2, "tests": 4, "kind": "spoiled"} and e.report["patch"]["files"] == 1
    assert b"text.split())" in (judge.logs / "patch.diff").read_bytes()
    assert (judge.logs / "tests.log").exists() and (judge.logs / "control1.log").exists()


def test_without_controls_there_is_one_run(judge):
    assert [r["run"] for r in judge(GOLD, controls={"trials": 0}).report["runs"]] == ["tests"]


@pytest.mark.parametrize(
    ("work", "config", "code"),
    [
        (writes({"src/words.py": "import os, sys\nif 'pytest' in sys.modules: os.kill(os.getpid(), 9)\n"}), {}, "tests_crashed"),
        (writes({"src/words.py": "import os\nos._exit(0)\n"}), {}, "no_report"),
        (writes({"src/words.py": "import time\ntime.sleep(600)\n"}), {"timeout_seconds": 5}, "evaluation_timeout"),
    ],
)  # fmt: skip
def test_a_crash_that_comes_with_the_patch_is_the_agents(judge, work, config, code):
    e = judge(work, **config)
    assert (e.verdict, e.outcome_reward, e.report["reason"]) == ("failed", 0.0, code)
    assert [r["run"] for r in e.report["runs"]] == ["tests", "pristine"]


@pytest.mark.parametrize(
    ("command", "config", "code"),
    [
        ("exit 127", {}, "tests_crashed"),
        ("echo hello", {}, "no_report"),
        ("sleep 600", {"timeout_seconds": 2}, "evaluation_timeout"),
    ],
)
def test_a_crash_without_the_patch_is_the_evaluations(judge, command, config, code):
    with pytest.raises(EvaluatorError) as e:
        judge(GOLD, test_command=command, **config)
    assert e.value.code == code and e.value.retryable
    excuse = {"tests_crashed": "crash", "evaluation_timeout": "timeout"}.get(code, code)
    assert judge(GOLD, test_command=command, treat_as_failed=[excuse], **config).report["reason"] == code


HANG = writes({"src/words.py": "while True: pass\n"})


def test_a_hang_is_the_agents_without_a_limit_of_its_own(judge):
    """One run gets a share of the budget that leaves time for another one."""
    e = judge(HANG, budget=45, timeout_seconds=None, controls={"trials": 0})
    assert (e.verdict, e.outcome_reward, e.report["reason"]) == ("failed", 0.0, "evaluation_timeout")
    assert [r["run"] for r in e.report["runs"]] == ["tests", "pristine"]
    assert 15 <= e.report["runs"][0]["seconds"] < 45


def test_what_was_lost_before_does_not_shorten_a_run(judge):
    """With less left than a run may take, a hang tells nothing about the agent."""
    with pytest.raises(EvaluatorError) as e:
        judge(HANG, budget=600, left=15, timeout_seconds=None)
    assert e.value.code == "evaluation_timeout" and e.value.retryable


def test_hanging_in_the_control_runs_is_no_way_out(judge):
    known = hashlib.sha256(PYTHON.tests["tests/test_words.py"].encode()).hexdigest()
    hang = f"""
import hashlib, pathlib
if hashlib.sha256(pathlib.Path("tests/test_words.py").read_bytes()).hexdigest() != {known!r}:
    while True: pass
"""
    e = judge(writes({"src/words.py": PYTHON.gold["src/words.py"] + hang}), timeout_seconds=10)
    assert (e.verdict, e.outcome_reward, e.report["reason"]) == ("failed", 0.0, "unconfirmed")


NEW = {"testing/deep/test_new.py": PYTHON.tests["tests/test_words.py"]}
BLOCKS = [
    "echo x >testing",
    "ln -s src testing",
    "mkdir testing && echo x >testing/deep",
    "mkdir testing && ln -s /tmp testing/deep",
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("by", ["test_patch", "files"])
def test_nobody_blocks_the_way_of_the_tests(judge, block, by):
    ids = [t.replace("tests/test_words.py", next(iter(NEW))) for t in PYTHON.fail_to_pass]
    files = [{"target": p, "content": c} for p, c in NEW.items()]
    config = {"fail_to_pass": ids, "pass_to_pass": [], "test_command": PYTHON.command.replace("tests", "testing"),
              "test_patch": diff({}, NEW) if by == "test_patch" else "", "files": files if by == "files" else []}  # fmt: skip
    config["test_command"] = config["test_command"].replace("{python}", sys.executable)
    e = judge(f"{GOLD} && {block}", controls={"trials": 0}, **config)
    assert e.verdict == "passed" and e.report["patch"]["protected"] in (["testing"], ["testing/deep"])
    e = judge(f"{HALF} && {block}", **config)
    assert e.verdict == "failed" and "reason" not in e.report


def test_a_test_patch_that_fails_with_the_agents_patch_only_is_the_agents(judge, monkeypatch):
    """Whatever the protection may have missed."""
    data = diff(PYTHON.files, {"tests/test_words.py": "x = 1\n"}).encode()
    monkeypatch.setattr(patch, "extract", lambda *_: Patch(data=data, files=["tests/test_words.py"]))
    e = judge(GOLD)
    assert (e.verdict, e.outcome_reward, e.report["reason"]) == ("failed", 0.0, "test_patch_failed")


def test_a_broken_instance_is_no_verdict(judge):
    with pytest.raises(EvaluatorError) as e:
        judge(GOLD, test_patch="--- a/tests/none.py\n+++ b/tests/none.py\n@@ -1 +1 @@\n-a\n+b\n")
    assert (e.value.code, e.value.retryable) == ("test_patch_failed", False)
    with pytest.raises(EvaluatorError) as e:
        judge(GOLD, base_commit="0123456789abcdef0123456789abcdef01234567")
    assert (e.value.code, e.value.retryable) == ("wrong_base", False)


@pytest.mark.parametrize(("required", "verdict"), [(2, "passed"), (3, "failed")])
def test_reruns_are_counted_and_recorded(judge, required, verdict):
    """One of three sandboxes has a file that makes a test fail."""
    work = writes(
        {
            "src/words.py": PYTHON.gold["src/words.py"]
            + "\nimport os\nif os.path.exists('unlucky'):\n    initials = None\n"
        }
    )
    lots = iter(["true", f"touch {REPO}/unlucky", "true"])
    e = judge(work, fresh=lambda: next(lots), controls={"trials": 0}, reruns={"n": 3, "required": required})
    assert e.verdict == verdict
    assert [(r["run"], r["passed"]) for r in e.report["runs"]] == [("tests", 4), ("tests2", 3), ("tests3", 4)]


def test_a_patch_file(judge):
    source = {"source": f"{REPO}/model.patch"}
    good = diff(PYTHON.files, PYTHON.gold)
    e = judge(writes({"model.patch": good}), patch=source)
    assert e.verdict == "passed" and e.report["patch"]["files"] == 1
    planted = good + diff({}, {"conftest.py": "x = 1\n"}) + diff(PYTHON.files, {"tests/test_words.py": "x = 1\n"})
    e = judge(writes({"model.patch": planted}), patch=source)
    assert e.verdict == "passed" and e.report["patch"]["protected"] == ["conftest.py", "tests/test_words.py"]
    e = judge(writes({"model.patch": planted}), patch=source | {"on_protected": "fail"})
    assert (e.verdict, e.report["reason"]) == ("failed", "patch_touches_protected")
    assert judge(writes({"model.patch": "garbage\n"}), patch=source).report["reason"] == "patch_does_not_apply"
    assert (
        judge(writes({"model.patch": good}), patch=source | {"limit_bytes": 10}).report["reason"] == "patch_too_large"
    )


@pytest.mark.parametrize("head", ["--- zz/{}\n+++ zz/{}\n", '--- "a/\\164{}"\n+++ "b/\\164{}"\n'])
def test_tests_of_the_agents_own_are_not_run(judge, head):
    """The image has the tests, and a patch file writes their path as only git reads it."""
    old, mine = PYTHON.files["tests/test_words.py"], "def test_slug():\n    pass\n"
    path = "tests/test_words.py" if "zz" in head else "ests/test_words.py"
    lines = [f"@@ -1,{len(old.splitlines())} +1,2 @@\n", *(f"-{x}" for x in old.splitlines(True))]
    lines += [f"+{x}" for x in mine.splitlines(True)]
    readme = diff(PYTHON.files, {"README.md": "x\n"})
    broken = diff(PYTHON.files, {"src/words.py": "count = slug = lambda text: 0\n"})
    model = readme + broken + head.replace("{}", path) + "".join(lines)
    config = {"patch": {"source": f"{REPO}/model.patch"}, "test_patch": "", "test_files": ["tests/test_words.py"],
              "fail_to_pass": PYTHON.pass_to_pass[:1], "pass_to_pass": []}  # fmt: skip
    e = judge(writes({"model.patch": model}), **config)
    assert (e.verdict, e.outcome_reward) == ("failed", 0.0) and "reason" not in e.report
    assert (e.report["patch"]["protected"], e.report["patch"]["files"]) == (["tests/test_words.py"], 2)


def test_run_empty_asks_the_tests(judge):
    assert judge("true").report["reason"] == "empty_patch"
    e = judge("true", run_empty=True)
    assert e.verdict == "failed" and "fail_to_pass" in e.report


def test_partial_of_all_tests(judge):
    assert judge(HALF, partial="all", controls={"trials": 0}).outcome_reward == 0.75
    assert judge(writes({"README.md": "x\n"}), partial="all").outcome_reward == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fail_to_pass": []}, "fail_to_pass"),
        ({"fail_to_pass": ["a"], "pass_to_pass": ["a"]}, "'a' stands in pass_to_pass too"),
        ({"report": {"kind": "exit_code"}}, "single tests are judged"),
        ({"reruns": {"n": 1, "required": 2}}, "reruns.required"),
        ({"base_commit": "main; rm -rf"}, "base_commit"),
        ({"files": [{"target": "/etc/x", "content": ""}]}, r"files\[0\]\.target.*not relative"),
        ({"patch": {"exclude": ["../x"]}}, r"patch\.exclude\[0\]"),
        ({"controls": {"trials": 9}}, "controls.trials"),
        ({"controls": {"tampered_reward": 1}}, "controls.tampered_reward"),
        ({"tests": []}, "unknown key"),
    ],
)
def test_config_is_strict(change, message):
    with pytest.raises(InvalidTask, match=message):
        Swe.from_config({"test_command": "x", "fail_to_pass": ["t"]} | change)


IDS = ["a", "b[1]", "c::d"]
STATUSES = st.sampled_from(["passed", "failed", "error", "skipped", "xfailed", None])


@given(st.tuples(*(STATUSES for _ in range(6))), st.sampled_from(["none", "fail_to_pass", "all"]), st.integers(0, 2))
def test_grading_laws(statuses, partial, exit_code):
    ids = [*IDS, *(f"p{i}" for i in IDS)]
    tests: dict[str, Status] = {t: s for t, s in zip(ids, statuses, strict=True) if s is not None}
    config = load({"test_command": "x", "fail_to_pass": ids[:3], "pass_to_pass": ids[3:], "partial": partial}, "swe")
    e = grade(config, tests, exit_code)
    fixed = [tests.get(t) in ("passed", "xfailed") for t in ids[:3]]
    kept = [tests.get(t) in ("passed", "xfailed", "skipped") for t in ids[3:]]
    assert 0.0 <= e.outcome_reward <= 1.0
    assert (e.verdict == "passed") <= (all(fixed) and all(kept))
    if not any(fixed) or (partial == "none" and not (all(fixed) and all(kept))):
        assert e.outcome_reward == 0.0
    if partial == "fail_to_pass" and not all(kept):
        assert e.outcome_reward == 0.0


def test_paths_of_a_patch():
    text = "diff --git a/x b/y\nrename from x\nrename to y\n--- a/p q\n+++ b/p q\t2020\n--- /dev/null\n+++ b/new\n"
    assert patched(text) == ["new", "p q", "x", "y"]
