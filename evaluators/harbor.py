"""`harbor`: tasks of Harbor and Terminal-Bench. Their tests look at the agent's final file system and write a reward file.

The final state is brought into a fresh sandbox of the same image in which none of the agent's processes runs.
"""

from __future__ import annotations

import json
import math
import random
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from evaluators import controls, running, spoiling, state
from evaluators.config import WHERE, check_path, read
from evaluators.controls import ControlRules
from evaluators.patch_space import tail
from evaluators.running import CRASH_CODES, Excuse
from polar.errors import EvaluatorError, InvalidTask, NotFound
from polar.judge import Outcome
from polar.result import Evaluation, Verdict
from polar.sandbox import ExecResult, Sandbox
from polar.task import Env, Seconds

_LIMIT = 1 << 20
Cause = Literal[Excuse, "state_too_large"]


class _Run(Struct, kw_only=True):
    """Either `evaluation`, or `error` with, where it can be the agent's doing, its `cause`."""

    evaluation: Evaluation | None = None
    cause: Cause | None = None
    error: EvaluatorError | None = None
    kept: list[str] = field(default_factory=list)
    spoiled: int = 0
    report: dict[str, Any] = field(default_factory=dict)


class Config(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`tests`: the folder that `evaluation_prepare` of the evaluator's runtime fills; `logs`: where the verifier leaves
    `reward.txt` (a number) or `reward.json` (metrics, of which `reward_key` is the reward; one alone needs no name). `state`:
    the folder whose final state is judged. `exclude`: further paths that stay as the image has them; `protect_hooks`: so does
    what starts with a shell, an interpreter or a test runner. `treat_as_failed`: which of timeout, crash, no_report,
    state_too_large is the agent's failure."""

    tests: str = "/tests"
    logs: str = "/logs/verifier"
    command: Annotated[str, Meta(min_length=1)] = "bash /tests/test.sh"
    state: str = "/"
    cwd: str | None = None
    reward_key: str = "reward"
    env: Env = field(default_factory=dict)
    timeout_seconds: Seconds | None = None
    exclude: list[str] = field(default_factory=list)
    crash_exit_codes: list[int] = field(default_factory=lambda: list(CRASH_CODES))
    treat_as_failed: list[Cause] = field(default_factory=lambda: ["state_too_large"])
    protect_hooks: bool = True
    controls: ControlRules = field(default_factory=ControlRules)


class Harbor:
    """Codes of its EvaluatorErrors: `tests_crashed`, `evaluation_timeout`, `no_report`, `state_too_large`, which are also
    reasons of a failed verdict; others: `tampered`, `unconfirmed`."""

    name = "harbor"
    needs_sandbox = True
    collects: tuple[str, ...] = ()

    def __init__(self, config: Config):
        self.config = config
        self.changes_under = config.state

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Harbor:
        c = read(config, Config, cls.name)
        for name in ("tests", "logs"):
            check_path(getattr(c, name), name)
        for n, path in enumerate(c.exclude):
            check_path(path, f"exclude[{n}]")
        check_path(c.state, "state", folder=True)
        for path in _own(c):
            if (c.state.rstrip("/") + "/").startswith(path.rstrip("/") + "/"):
                raise InvalidTask(
                    f"{WHERE}.state: '{c.state}' lies in '{path}', which stays the judge's; take another folder"
                )
        return cls(c)

    def evaluate(self, outcome: Outcome) -> Evaluation:
        ran = self._once(outcome, outcome.sandbox(), "tests", spoil=False)
        evaluation = self._judged(ran)
        if (evaluation.outcome_reward or 0) > self.config.controls.floor:
            evaluation = self._confirm(outcome, evaluation)
        if ran.kept:
            evaluation.report["kept_pristine"] = ran.kept[:50]
        return evaluation

    def _judged(self, ran: _Run) -> Evaluation:
        if ran.evaluation is not None:
            ran.evaluation.report |= ran.report
            return ran.evaluation
        assert ran.error is not None
        if ran.cause not in self.config.treat_as_failed:
            raise ran.error
        return _evaluation(0.0, ran.report | {"reason": ran.error.code, "message": ran.error.message})

    def _confirm(self, outcome: Outcome, evaluation: Evaluation) -> Evaluation:
        """With every Python test spoiled, the reward can't be as good."""
        rules = self.config.controls
        if not rules.trials or outcome.another is None:
            return evaluation
        with running.passing(outcome.another()) as sandbox:
            ran = self._once(outcome, sandbox, "control1", spoil=True)
        # No reward from tests that fail is less than one; no time to tell is nothing.
        if ran.error is not None and ran.cause in (None, "timeout"):
            raise ran.error
        reward = ran.evaluation.outcome_reward if ran.evaluation is not None else None
        if ran.spoiled and (reason := controls.not_lower(reward, evaluation.outcome_reward)):
            fee = rules.tampered_reward if reason == "tampered" else 0.0
            return _evaluation(fee, {"reason": reason, "message": controls.AS_GOOD})
        evaluation.report["controls"] = {"tests": ran.spoiled, "reward": reward}
        return evaluation

    def _once(self, outcome: Outcome, sandbox: Sandbox, name: str, *, spoil: bool) -> _Run:
        c = self.config

        def left() -> float:
            return running.left(outcome.remaining)

        kept: list[str] = []
        if outcome.changes is not None:
            try:
                kept = state.restore(sandbox, outcome.changes, _own(c), left, protect=c.protect_hooks)
            except state.TooLarge as e:
                error = EvaluatorError(str(e), code="state_too_large", retryable=False)
                return _Run(cause="state_too_large", error=error)
        spoiled = self._spoil(sandbox) if spoil else 0
        # The verifier's folder is the judge's own: what the image had there is gone.
        sandbox.write(f"{c.logs}/.fresh", b"")
        made = sandbox.exec(["find", c.logs, "-mindepth", "1", "-delete"], cwd="/", timeout=left())
        if made.exit_code != 0:
            raise EvaluatorError(f"can't clear {c.logs}: {tail(made)}", code="prepare_failed")
        spec = outcome.task.evaluator
        result = sandbox.exec(
            c.command,
            env={**(spec.env if spec else {}), **c.env},
            cwd=c.cwd,
            timeout=min(c.timeout_seconds or float("inf"), left()),
            log=outcome.logs / f"{name}.log",
        )
        sandbox.stop()
        ran = self._read(sandbox, result)
        ran.kept, ran.spoiled = kept, spoiled
        ran.report = {"exit_code": result.exit_code, "seconds": round(result.seconds, 3)}
        return ran

    def _spoil(self, sandbox: Sandbox) -> int:
        """Every Python test fails at its start; how many there are."""
        with tempfile.TemporaryDirectory() as temp:
            folder = Path(temp) / "tests"
            sandbox.download(self.config.tests, folder, limit=64 << 20)
            count = 0
            for path in folder.rglob("*.py"):
                if path.is_symlink() or not path.is_file():
                    continue
                source = path.read_bytes()
                out, found = spoiling.spoil(source, spoiling.functions(source), random.Random(), certain=True)
                if found:
                    sandbox.write(
                        f"{self.config.tests}/{path.relative_to(folder)}", out, mode=path.stat().st_mode & 0o777
                    )
                    count += len(found)
            return count

    def _read(self, sandbox: Sandbox, result: ExecResult) -> _Run:
        c, code = self.config, result.exit_code
        if result.timed_out:
            # Only its own limit tells something about the verifier; the evaluation's budget may have gone elsewhere.
            own = c.timeout_seconds is not None and result.seconds >= c.timeout_seconds - 0.5
            message = f"the verifier ran {result.seconds:.1f} s: {tail(result)}"
            return _Run(cause="timeout" if own else None, error=EvaluatorError(message, code="evaluation_timeout"))
        if (metrics := self._metrics(sandbox)) is not None:
            reward = metrics.get(c.reward_key, next(iter(metrics.values())) if len(metrics) == 1 else None)
            if reward is not None:
                return _Run(evaluation=_evaluation(reward, {"metrics": metrics} if len(metrics) > 1 else {}))
            message = f"reward.json has no '{c.reward_key}': {sorted(metrics)[:10]}"
        elif code is None or code < 0 or code in c.crash_exit_codes:
            error = EvaluatorError(f"exit code {code}: {tail(result)}", code="tests_crashed")
            return _Run(cause="crash", error=error)
        else:
            message = f"no reward.txt or reward.json with numbers in {c.logs}: {tail(result)}"
        return _Run(cause="no_report", error=EvaluatorError(message, code="no_report"))

    def _metrics(self, sandbox: Sandbox) -> dict[str, float] | None:
        for name in ("reward.json", "reward.txt"):
            with tempfile.TemporaryDirectory() as temp:
                target = Path(temp) / name
                try:
                    cut = sandbox.download(f"{self.config.logs}/{name}", target, limit=_LIMIT)
                except NotFound:
                    continue
                if cut or target.is_symlink() or not target.is_file():
                    return None
                return _numbers(target.read_bytes())
        return None


def _own(c: Config) -> list[str]:
    """Paths at which nothing of the agent's is brought in."""
    return [c.tests, c.logs, "/logs", "/solution", "/oracle", *c.exclude]


def _numbers(data: bytes) -> dict[str, float] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    found = value if isinstance(value, dict) else {"reward": value}
    if not found or not all(isinstance(v, int | float) and math.isfinite(v) for v in found.values()):
        return None
    return {str(k): float(v) for k, v in found.items()}


def _evaluation(reward: float, report: dict[str, Any]) -> Evaluation:
    verdict: Verdict = "passed" if reward >= 1 else "partial" if reward > 0 else "failed"
    return Evaluation(verdict=verdict, outcome_reward=reward, report=report, evaluator="harbor")
