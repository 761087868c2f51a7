from __future__ import annotations

import sys
from pathlib import Path

import pytest
from folder_sandbox import FolderSandbox, outcome

from evaluators.test_on_output import TestOnOutput
from polar.errors import EvaluatorError, InvalidTask
from polar.result import Evaluation

PYTEST = f"{sys.executable} -m pytest -p no:cacheprovider -rA -q tests"


def judge(tmp_path: Path, config: dict, *, agent: dict[str, Path] | None = None, **kw) -> Evaluation:
    return TestOnOutput.from_config(config).evaluate(outcome(tmp_path, artifacts=agent, **kw))


def agent_file(tmp_path: Path, content: str) -> Path:
    path = tmp_path / "agent" / "answer"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def test_exit_code_over_a_collected_file(tmp_path):
    config = {"command": 'test "$(cat answer.txt)" = 42', "collect": ["answer.txt"]}
    assert TestOnOutput.from_config(config).collects == ("answer.txt",)
    good = judge(tmp_path / "a", config, agent={"answer.txt": agent_file(tmp_path, "42\n")})
    assert (good.verdict, good.outcome_reward, good.evaluator) == ("passed", 1.0, "test_on_output")
    bad = judge(tmp_path / "b", config, agent={"answer.txt": agent_file(tmp_path, "41\n")})
    assert (bad.verdict, bad.outcome_reward) == ("failed", 0.0)
    none = judge(tmp_path / "c", config)
    assert (none.verdict, none.report["missing_artifacts"]) == ("failed", ["answer.txt"])


def test_environment_and_log(tmp_path):
    config = {"command": 'echo "$A $B"; test -n "$POLAR_REPORT"', "env": {"B": "config"}, "cwd": "sub"}
    box = FolderSandbox(tmp_path / "fresh")
    (box.root / "sub").mkdir()
    assert judge(tmp_path, config, sandbox=box, env={"A": "spec", "B": "spec"}).verdict == "passed"
    assert (tmp_path / "logs" / "tests.log").read_text() == "spec config\n"


TESTS = """
from code import add
def test_one(): assert add(1, 1) == 2
def test_two(): assert add(2, 3) == 5
"""


@pytest.fixture
def work(tmp_path):
    """The agent's working folder with a half right solution."""
    folder = tmp_path / "agent"
    folder.mkdir()
    (folder / "code.py").write_text("def add(a, b): return 2\n")
    return folder


def on_tests(**more) -> dict:
    files = [{"target": "tests/test_add.py", "content": TESTS.replace("from code", "from tests.code")}]
    # A module of the agent's beside the tests, found without an install.
    command = f"touch tests/__init__.py; cp code.py tests/code.py; {PYTEST}"
    return {"command": command, "collect": ["."], "files": files, "report": {"kind": "pytest"}, **more}


ONE, TWO = "tests/test_add.py::test_one", "tests/test_add.py::test_two"


@pytest.mark.parametrize(
    ("rules", "verdict", "reward"),
    [
        ({}, "failed", 0.0),
        ({"partial_credit": True}, "partial", 0.5),
        ({"required": [ONE]}, "passed", 1.0),
        ({"optional": [TWO]}, "passed", 1.0),
        ({"required": [ONE, TWO], "partial_credit": True}, "partial", 0.5),
        ({"required": [ONE, "tests/test_add.py::gone"]}, "failed", 0.0),
        ({"required": [TWO], "forbidden": [ONE], "partial_credit": True}, "failed", 0.0),
    ],
)
def test_required_forbidden_optional(tmp_path, work, rules, verdict, reward):
    out = judge(tmp_path, on_tests(**rules), agent={".": work})
    assert (out.verdict, out.outcome_reward) == (verdict, reward), out.report
    assert out.report["counts"] == {"passed": 1, "failed": 1}


def test_a_required_test_that_did_not_run_is_named(tmp_path, work):
    out = judge(tmp_path, on_tests(required=["tests/test_add.py::gone"]), agent={".": work})
    assert out.report["failing"] == ["tests/test_add.py::gone: missing"]


def test_junit_through_the_fresh_report_path(tmp_path, work):
    config = on_tests(report={"kind": "junit"})
    config["command"] += " --junitxml=$POLAR_REPORT"
    box = FolderSandbox(tmp_path / "fresh")
    out = judge(tmp_path, config | {"required": ["tests.test_add::test_one"]}, agent={".": work}, sandbox=box)
    assert out.verdict == "passed"
    assert box.stopped  # nothing of the tests is alive when the report is read


def test_planted_tests_reports_and_links_are_overwritten(tmp_path, work):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (work / "tests").symlink_to(elsewhere)  # the judge's tests would land elsewhere
    (work / "reward.txt").write_text("1.0")  # a report from before the run
    (work / "check.sh").symlink_to("/dev/null")  # an empty test always passes
    config = {
        "command": "sh check.sh && test ! -L tests && test -f tests/a",
        "collect": ["."],
        "files": [{"target": "check.sh", "content": "exit 0"}, {"target": "tests/a", "content": ""}],
    }
    assert judge(tmp_path, config, agent={".": work}).verdict == "passed"
    assert not list(elsewhere.iterdir())
    assert (work / "tests").is_symlink()  # the artifacts of the attempt stay as they were, for a second try
    config["files"][0]["content"] = "exit 3"
    assert judge(tmp_path / "b", config, agent={".": work}).verdict == "failed"
    config |= {"command": "true", "report": {"kind": "reward_file", "path": "reward.txt"}}
    with pytest.raises(EvaluatorError) as e:
        judge(tmp_path / "c", config, agent={".": work})
    assert e.value.code == "no_report"


def test_a_link_on_the_host_is_no_artifact(tmp_path):
    (tmp_path / "secret").write_text("42")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "secret")
    out = judge(tmp_path, {"command": "test -e answer.txt", "collect": ["answer.txt"]}, agent={"answer.txt": link})
    assert out.verdict == "failed" and out.report["missing_artifacts"] == ["answer.txt"]


@pytest.mark.parametrize(
    ("reward", "verdict"), [("1", "passed"), ("0.5", "partial"), ("0", "failed"), ("-2", "failed"), ("3", "passed")]
)
def test_reward_file(tmp_path, reward, verdict):
    config = {"command": f"echo {reward} > $POLAR_REPORT; exit 1", "report": {"kind": "reward_file"}}
    out = judge(tmp_path, config)
    assert (out.verdict, out.outcome_reward) == (verdict, float(reward))


@pytest.mark.parametrize(
    ("passing", "failing", "controls", "verdict", "reward", "reason"),
    [
        ("-1", "-1", {}, "failed", -1.0, None),
        ("0.5", "-1", {}, "partial", 0.5, None),
        ("0.2", "0.2", {}, "failed", 0.0, "unconfirmed"),
        ("0.2", "0.2", {"floor": 0.2}, "partial", 0.2, None),
        ("1", "1", {"tampered_reward": -0.5}, "failed", -0.5, "tampered"),
    ],
)
def test_only_what_tests_give_is_asked_for_again(tmp_path, passing, failing, controls, verdict, reward, reason):
    run = f"{sys.executable} tests/test_one.py"
    config = {
        "command": f"{run} && echo {passing} >$POLAR_REPORT || echo {failing} >$POLAR_REPORT",
        "files": [{"target": "tests/test_one.py", "content": "def test_one(): assert 1 == 1\ntest_one()\n"}],
        "report": {"kind": "reward_file"},
        "controls": controls,
    }
    o = outcome(tmp_path)
    o.another = lambda: FolderSandbox(tmp_path / "another")
    out = TestOnOutput.from_config(config).evaluate(o)
    assert (out.verdict, out.outcome_reward) == (verdict, reward), out
    assert out.report.get("reason", "").partition(":")[0] == (reason or "")


def test_a_folder_with_the_name_of_a_runners_module_is_kept_and_a_package_is_not(tmp_path):
    work = tmp_path / "work"
    for name in ("mock/answer.txt", "packaging/answer.txt", "pytest/__init__.py", "real/__init__.py", "py.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("42")
    (work / "attrs").symlink_to("real")
    config = {"command": "test -e mock/answer.txt && test -e packaging/answer.txt", "collect": ["."]}
    out = judge(tmp_path, config, agent={".": work})
    assert (out.verdict, out.report["protected"]) == ("passed", ["./attrs", "./py.py", "./pytest/__init__.py"])


def test_an_exit_code_that_no_failing_test_explains_is_a_failure(tmp_path):
    config = {"command": "echo 1..1; echo ok 1 - a; exit 3", "report": {"kind": "tap"}}
    out = judge(tmp_path, config)
    assert out.verdict == "failed" and "exit code 3" in out.report["reason"]
    assert judge(tmp_path, config | {"check_exit_code": False}).verdict == "passed"


def test_no_test_at_all_is_no_success(tmp_path):
    config = {"command": "echo 1..1; echo 'ok 1 - a # SKIP'", "report": {"kind": "tap"}}
    assert judge(tmp_path, config).verdict == "failed"


@pytest.mark.parametrize(
    ("config", "code", "excuse"),
    [
        ({"command": "exit 127"}, "tests_crashed", "crash"),
        ({"command": "kill -9 $$"}, "tests_crashed", "crash"),
        ({"command": "exit 3", "crash_exit_codes": [3]}, "tests_crashed", "crash"),
        ({"command": "sleep 30", "timeout_seconds": 0.3}, "evaluation_timeout", "timeout"),
        ({"command": "true", "report": {"kind": "junit"}}, "no_report", "no_report"),
        ({"command": "echo '<x' > $POLAR_REPORT", "report": {"kind": "junit"}}, "no_report", "no_report"),
        ({"command": "mkdir $POLAR_REPORT", "report": {"kind": "junit"}}, "no_report", "no_report"),
        ({"command": "echo hi", "report": {"kind": "pytest"}}, "no_report", "no_report"),
    ],
)
def test_failures_of_the_evaluation_have_their_codes_and_no_reward(tmp_path, config, code, excuse):
    with pytest.raises(EvaluatorError) as e:
        judge(tmp_path, config)
    assert e.value.code == code and e.value.retryable
    out = judge(tmp_path, config | {"treat_as_failed": [excuse]})
    assert (out.verdict, out.outcome_reward) == ("failed", 0.0) and code in out.report["reason"]


def test_the_evaluations_own_budget_is_never_the_agents_fault(tmp_path):
    config = {"command": "sleep 30", "treat_as_failed": ["timeout"], "timeout_seconds": 60}
    for seconds in (0.3, 0.0):
        with pytest.raises(EvaluatorError) as e:
            judge(tmp_path, config, seconds=seconds)
        assert e.value.code == "evaluation_timeout"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "command"),
        ({"command": "x", "comand": "y"}, r"evaluator\.config\.comand: unknown key .* allowed: .*command"),
        ({"command": ""}, "command"),
        ({"command": "x", "files": [{"target": "a"}]}, r"files\[0\].*content"),
        ({"command": "x", "files": [{"target": "../a", "content": ""}]}, r"files\[0\]\.target.*\.\./a"),
        ({"command": "x", "files": [{"target": ".", "content": ""}]}, r"files\[0\]\.target"),
        ({"command": "x", "collect": [""]}, r"collect\[0\]"),
        ({"command": "x", "report": {"kind": "nunit"}}, "report.*nunit"),
        ({"command": "x", "report": {"kind": "tap", "path": "x"}}, "report.*path"),
        ({"command": "x", "report": {"kind": "regex", "pattern": "("}}, "report.*regular expression"),
        ({"command": "x", "report": {"kind": "junit", "path": "a/.."}}, r"report\.path"),
        ({"command": "x", "required": ["a"]}, "exit_code"),
        ({"command": "x", "report": {"kind": "tap"}, "required": ["a"], "forbidden": ["a"]}, "'a'"),
        ({"command": "x", "timeout_seconds": 0}, "timeout_seconds"),
    ],
)
def test_config_is_strict(config, message):
    with pytest.raises(InvalidTask, match=message):
        TestOnOutput.from_config(config)
