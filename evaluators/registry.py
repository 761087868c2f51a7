"""Evaluators by name, or a user's own by "module:Class"."""

from __future__ import annotations

from polar import plugins
from polar.errors import InvalidTask, PolarError
from polar.judge import Evaluator
from polar.task import EvaluatorSpec


def load_evaluator(spec: EvaluatorSpec) -> Evaluator:
    """The evaluator of a task, its config checked. Raises InvalidTask; used at submit and by the stages.

    A user's evaluator is a class on the workers' import path, named as `"my_module:CountsLines"`:

        class CountsLines:
            name = "counts_lines"
            needs_sandbox = False
            collects = ("answer.txt",)              # collected from the agent's sandbox

            @classmethod
            def from_config(cls, config):           # raise InvalidTask for what you don't know
                return cls()

            def evaluate(self, outcome):            # raise EvaluatorError when you can't judge
                path = outcome.artifacts.get("answer.txt")
                lines = len(path.read_bytes().splitlines()) if path else 0
                return Evaluation(verdict="passed" if lines == 3 else "failed", outcome_reward=float(lines == 3))
    """
    cls = plugins.load(plugins.EVALUATORS, spec.name, "evaluator.name")
    make = getattr(cls, "from_config", None)
    if make is None:
        raise InvalidTask(f"evaluator.name: '{spec.name}' has no from_config(config)")
    try:
        evaluator = make(dict(spec.config))
    except PolarError:
        raise
    except Exception as e:
        raise InvalidTask(f"evaluator.config: '{spec.name}' refused it: {type(e).__name__}: {e}") from e
    if not isinstance(evaluator, Evaluator):
        lacks = [n for n in ("name", "needs_sandbox", "collects", "evaluate") if not hasattr(evaluator, n)]
        raise InvalidTask(f"evaluator.name: '{spec.name}' lacks {', '.join(lacks)}")
    if isinstance(evaluator.collects, str):
        raise InvalidTask(f"evaluator.name: collects of '{spec.name}' is a string; a tuple of sandbox paths is needed")
    return evaluator
