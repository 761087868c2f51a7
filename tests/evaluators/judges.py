"""Evaluators of a user's own that go wrong, for the workers to load."""

from __future__ import annotations

from pathlib import Path

from polar.judge import Outcome
from polar.result import Evaluation


class Buggy:
    """Raises what no evaluator should, the first `times` times; `counter` is a host file."""

    name = "buggy"
    needs_sandbox = False
    collects = ()

    def __init__(self, counter: str, times: int):
        self.counter, self.times = Path(counter), times

    @classmethod
    def from_config(cls, config):
        return cls(config["counter"], config["times"])

    def evaluate(self, outcome: Outcome) -> Evaluation:
        seen = len(self.counter.read_text()) if self.counter.exists() else 0
        self.counter.write_text("x" * (seen + 1))
        if seen < self.times:
            raise TypeError("a bug")
        return Evaluation(verdict="passed", outcome_reward=1.0)


class Several:
    """Makes three sandboxes and tells whether they are different ones."""

    name = "several"
    needs_sandbox = True
    collects = ()

    @classmethod
    def from_config(cls, config):
        return cls()

    def evaluate(self, outcome: Outcome) -> Evaluation:
        assert outcome.another is not None
        boxes = [outcome.sandbox(), outcome.another(), outcome.another()]
        boxes[1].destroy()
        different = len({b.ref.handle for b in boxes}) == 3 and outcome.sandbox() is boxes[0]
        return Evaluation(verdict="passed" if different else "failed", outcome_reward=float(different))
