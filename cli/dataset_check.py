"""Does an instance tell right from wrong? Its own solution must pass, and nothing at all must fail."""

from __future__ import annotations

import contextlib
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cli.dataset_swe import Instance
from evaluators.registry import load_evaluator
from polar.config import Settings
from polar.errors import EvaluatorError, NotFound, PolarError
from polar.judge import Changes, Outcome
from polar.result import Evaluation
from polar.sandbox import LABEL_NAMESPACE, LABEL_PURPOSE, Sandbox
from polar.task import RuntimeSpec, TaskRequest, replace
from polar.trace import Fidelity, Trajectory
from runtimes.prepare import run_prepare
from runtimes.registry import load_runtime

# Applied in the agent's place; a data set's older patches need patch's leniency.
_APPLY = 'git apply {r} --whitespace=nowarn "$1" || patch -p1 -s --batch --fuzz=5 {r} -i "$1"'


@dataclass
class Check:
    name: str
    gold: str
    empty: str
    seconds: float
    message: str = ""

    @property
    def good(self) -> bool:
        return self.gold == "passed" and self.empty == "failed"


def check(instance: Instance, task: TaskRequest, settings: Settings) -> Check:
    started = time.monotonic()
    found: dict[str, str] = {}
    messages = []
    assert task.evaluator is not None
    if task.evaluator.name == "swe":  # that tests fail without a change is not to be taken on trust
        config = task.evaluator.config | {"run_empty": True}
        task = replace(task, evaluator=msgspec.structs.replace(task.evaluator, config=config))
    for what in ("gold", "empty"):
        try:
            e = _attempt(instance if what == "gold" else None, task, settings)
            found[what] = e.verdict
            wrong = e.verdict != ("passed" if what == "gold" else "failed")
            if wrong:
                messages.append(f"{what}: {_short(e)}")
        except PolarError as e:
            found[what] = e.code
            messages.append(f"{what}: {e.message}")
    return Check(instance.name, found["gold"], found["empty"], time.monotonic() - started, "; ".join(messages))


def _short(e: Evaluation) -> str:
    keep = {
        k: v for k, v in e.report.items() if k in ("reason", "message", "fail_to_pass", "pass_to_pass", "exit_code")
    }
    return str(keep)[:300]


def _attempt(gold: Instance | None, task: TaskRequest, settings: Settings) -> Evaluation:
    """As the pipeline does it: a sandbox that is changed, and the evaluator over fresh ones."""
    assert task.evaluator is not None
    evaluator = load_evaluator(task.evaluator)
    deadline = time.monotonic() + task.timeout_seconds + task.evaluation_timeout_seconds
    with tempfile.TemporaryDirectory(prefix="polar-check-") as temp, contextlib.ExitStack() as stack:
        folder = Path(temp)
        (folder / "logs").mkdir()

        def make(spec: RuntimeSpec, purpose: str) -> Sandbox:
            backend = spec.backend or settings.default_runtime
            runtime = load_runtime(backend, settings)
            left = max(1.0, deadline - time.monotonic())
            labels = {LABEL_NAMESPACE: f"check-{settings.namespace}", LABEL_PURPOSE: purpose}
            box = runtime.create(spec, labels=labels, proxy=None, timeout=left)
            stack.callback(box.destroy)
            steps = spec.prepare if purpose == "agent" or spec.evaluation_prepare is None else spec.evaluation_prepare
            run_prepare(box, steps, timeout=left, fetch=Path)
            return box

        def another() -> Sandbox:
            assert task.evaluator is not None
            return make(task.evaluator.runtime or task.runtime, "evaluation")

        fresh: list[Sandbox] = []

        def sandbox() -> Sandbox:
            if not fresh:
                fresh.append(another())
            return fresh[0]

        under = getattr(evaluator, "changes_under", None)
        return evaluator.evaluate(
            Outcome(
                task=task,
                session_id="check.s0",
                attempt=1,
                termination="finished",
                trajectory=Trajectory(builder="none", fidelity=Fidelity(completions=1)),
                artifacts={},
                changes=_changes(gold, make(task.runtime, "agent"), under, folder, settings) if under else None,
                sandbox=sandbox,
                another=another,
                remaining=lambda: deadline - time.monotonic(),
                logs=folder / "logs",
            )
        )


def _changes(gold: Instance | None, box: Sandbox, under: str, folder: Path, settings: Settings) -> Changes:
    try:
        baseline = box.baseline(under)
    except NotFound as e:
        raise EvaluatorError(f"the image has no folder {under}", code="wrong_base", retryable=False) from e
    if gold is not None:
        _solve(gold, box, under)
    box.stop()
    target = folder / "changes.tar"
    cut = box.changes(target, under=under, baseline=baseline, limit=settings.artifact_limit_bytes)
    return Changes(under=under, archive=target, truncated=cut)


def _solve(gold: Instance, box: Sandbox, under: str) -> None:
    if gold.gold_script:
        r = box.exec(["bash", "-c", gold.gold_script], timeout=1800)
    else:
        reverse = gold.gold.startswith("# reverse\n")
        box.write("/tmp/polar-gold.diff", gold.gold.removeprefix("# reverse\n").encode())
        script = _APPLY.format(r="-R" if reverse else "")
        r = box.exec(["sh", "-c", script, "gold", "/tmp/polar-gold.diff"], cwd=under, timeout=120)
    if r.exit_code != 0:
        text = " ".join(r.output.decode("utf-8", "replace").split())[-300:]
        raise EvaluatorError(
            f"the solution can't be applied: {text or r.exit_code}", code="gold_failed", retryable=False
        )
