from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from folder_sandbox import outcome

from evaluators.registry import load_evaluator
from evaluators.session_completed import SessionCompleted
from evaluators.test_on_output import TestOnOutput
from polar.errors import InvalidTask
from polar.judge import Evaluator, Outcome
from polar.result import Evaluation
from polar.task import EvaluatorSpec


def test_the_declared_entry_points_are_these_evaluators():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["polar.evaluators"]
    loaded = {n: getattr(import_module(p.partition(":")[0]), p.partition(":")[2]) for n, p in points.items()}
    assert loaded["session_completed"] is SessionCompleted and loaded["test_on_output"] is TestOnOutput
    assert all(cls.name == name for name, cls in loaded.items())


def test_load_with_config():
    e = load_evaluator(
        EvaluatorSpec(name="evaluators.test_on_output:TestOnOutput", config={"command": "x", "collect": ["a", "."]})
    )
    assert isinstance(e, Evaluator) and e.collects == ("a", ".") and e.needs_sandbox
    with pytest.raises(InvalidTask, match=r"evaluator\.name.*'nope'"):
        load_evaluator(EvaluatorSpec(name="nope"))


class CountsLines:
    """A user's own evaluator, as the registry's documentation shows it."""

    name = "counts_lines"
    needs_sandbox = False
    collects = ("answer.txt",)

    def __init__(self, lines: int):
        self.lines = lines

    @classmethod
    def from_config(cls, config):
        return cls(config.pop("lines"))

    def evaluate(self, outcome: Outcome) -> Evaluation:
        path = outcome.artifacts.get("answer.txt")
        right = path is not None and len(path.read_bytes().splitlines()) == self.lines
        return Evaluation(verdict="passed" if right else "failed", outcome_reward=float(right))


def test_a_users_class_works_by_its_import_path(tmp_path):
    spec = EvaluatorSpec(name=f"{__name__}:CountsLines", config={"lines": 3})
    answer = tmp_path / "answer"
    answer.write_text("1\n2\n3\n")
    evaluator = load_evaluator(spec)
    assert evaluator.evaluate(outcome(tmp_path, artifacts={"answer.txt": answer})).outcome_reward == 1.0
    assert evaluator.evaluate(outcome(tmp_path)).outcome_reward == 0.0
    assert spec.config == {"lines": 3}  # from_config got a copy


class NoFactory:
    pass


class NoJudge:
    name = "no_judge"

    @classmethod
    def from_config(cls, config):
        return cls()


class OnePath(CountsLines):
    collects = "answer.txt"  # type: ignore[assignment]

    @classmethod
    def from_config(cls, config):
        return cls(0)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoFactory", "from_config"),
        ("NoJudge", "lacks needs_sandbox, collects, evaluate"),
        ("CountsLines", "KeyError: 'lines'"),
        ("OnePath", "tuple of sandbox paths"),
        ("Missing", "can't import"),
    ],
)
def test_a_class_that_is_no_evaluator_is_refused(name, message):
    with pytest.raises(InvalidTask, match=message):
        load_evaluator(EvaluatorSpec(name=f"{__name__}:{name}"))


@pytest.mark.parametrize(
    ("termination", "completions", "verdict", "reward"),
    [
        ("finished", 2, "passed", 1.0),
        ("agent_error", 2, "failed", 0.0),
        ("agent_timeout", 2, "failed", 0.0),
        ("turn_limit", 2, "failed", 0.0),
        ("finished", 0, "not_evaluated", None),
        ("infra_error", 2, "not_evaluated", None),
        ("cancelled", 2, "not_evaluated", None),
    ],
)
def test_session_completed(tmp_path, termination, completions, verdict, reward):
    evaluator = SessionCompleted.from_config({})
    assert not evaluator.needs_sandbox and evaluator.collects == ()
    out = evaluator.evaluate(outcome(tmp_path, termination=termination, completions=completions))
    assert (out.verdict, out.outcome_reward, out.trace_rewards) == (verdict, reward, None)


def test_session_completed_takes_no_config():
    with pytest.raises(InvalidTask, match=r"evaluator\.config\.x: unknown key .* it takes none"):
        SessionCompleted.from_config({"x": 1})
