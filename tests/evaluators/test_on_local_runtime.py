"""The way of an attempt's files from the agent's sandbox into the judge's, with the real local runtime."""

from __future__ import annotations

from pathlib import Path

import pytest
from folder_sandbox import outcome

from evaluators.test_on_output import TestOnOutput
from polar.config import Settings
from polar.result import Evaluation
from polar.sandbox import Sandbox
from polar.task import RuntimeSpec
from runtimes.local import LocalRuntime


@pytest.fixture
def make(tmp_path):
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path / "data")))
    made: list[Sandbox] = []

    def make() -> Sandbox:
        made.append(runtime.create(RuntimeSpec(backend="local"), labels={"t": "t"}, proxy=None, timeout=30))
        return made[-1]

    yield make
    for sandbox in made:
        sandbox.destroy()


def judge(make, tmp_path: Path, agent_command: str, config: dict) -> Evaluation:
    agent = make()
    assert agent.exec(agent_command, timeout=30).exit_code == 0
    agent.stop()
    evaluator = TestOnOutput.from_config(config)
    artifacts = {}
    for n, path in enumerate(evaluator.collects):
        agent.download(path, tmp_path / f"artifact{n}", limit=1 << 20)
        artifacts[path] = tmp_path / f"artifact{n}"
    fresh = make()
    out = evaluator.evaluate(outcome(tmp_path, fresh, artifacts=artifacts))
    assert (tmp_path / "logs" / "tests.log").exists()
    return out


def test_a_file(make, tmp_path):
    config = {
        "command": "sh check.sh",
        "collect": ["answer.txt"],
        "files": [{"target": "check.sh", "content": 'test "$(cat answer.txt)" = 42 && test ! -e other'}],
    }
    assert judge(make, tmp_path, "echo 42 > answer.txt; touch other", config).verdict == "passed"


def test_a_folder_with_links_in_the_way_of_tests_and_report(make, tmp_path):
    config = {
        "command": "sh tests/check.sh && echo '{\"reward\": 0.5}' > out/reward.json",
        "collect": ["."],
        "files": [{"target": "tests/check.sh", "content": "test -f kept/x && test ! -L tests"}],
        "report": {"kind": "reward_file", "path": "out/reward.json"},
    }
    agent = (
        "mkdir kept else; touch kept/x; ln -s else tests; mkdir out; echo 1 > else/r; ln -s ../else/r out/reward.json"
    )
    out = judge(make, tmp_path, agent, config)
    assert (out.verdict, out.outcome_reward) == ("partial", 0.5)


def test_the_fresh_report_path(make, tmp_path):
    config = {"command": "echo 1 > $POLAR_REPORT", "report": {"kind": "reward_file"}}
    assert judge(make, tmp_path, "true", config).verdict == "passed"
