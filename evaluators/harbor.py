"""`harbor`: tasks of Harbor and Terminal-Bench. Their tests look at the agent's final file system and write a reward file.

The final state is brought into a fresh sandbox of the same image in which none of the agent's processes runs.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from evaluators import running, spoiling, state
from evaluators.config import check_path, read
from evaluators.controls import ControlRules
from evaluators.patch_space import tail
from evaluators.running import CRASH_CODES, Excuse
from polar.errors import EvaluatorError, NotFound
from polar.judge import Outcome
from polar.result import Evaluation, Verdict
from polar.sandbox import ExecResult, Sandbox
from polar.task import Env, Seconds

_LIMIT = 1 << 20


class Config(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`tests`: the folder that `evaluation_prepare` of the evaluator's runtime fills; `logs`: where the verifier leaves
    `reward.txt` (a number) or `reward.json` (metrics, of which `reward_key` is the reward; one alone needs no name). `state`:
    the folder whose final state is judged. `exclude`: further paths that stay as the image has them. `treat_as_failed`: which
    of timeout, crash, no_report is the agent's failure."""

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
    treat_as_failed: list[Excuse] = field(default_factory=list)
    controls: ControlRules = field(default_factory=ControlRules)


class Harbor:
    """Codes of its EvaluatorErrors: `tests_crashed`, `evaluation_timeout`, `no_report`, `state_too_large`."""

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
        return cls(c)

    def evaluate(self, outcome: Outcome) -> Evaluation:
        evaluation, kept = self._once(outcome, outcome.sandbox(), "tests", spoil=False)
        if evaluation.outcome_reward and self.config.controls.trials and outcome.another is not None:
            control, _ = self._once(outcome, outcome.another(), "control1", spoil=True)
            evaluation.report["controls"] = {
                "tests": control.report.get("spoiled", 0),
                "reward": control.outcome_reward,
            }
            if control.report.get("spoiled") and (control.outcome_reward or 0) >= evaluation.outcome_reward:
                message = "the same reward from tests that can't pass"
                evaluation = _evaluation(
                    self.config.controls.tampered_reward, {"reason": "tampered", "message": message}
                )
        if kept:
            evaluation.report["kept_pristine"] = kept[:50]
        return evaluation

    def _once(self, outcome: Outcome, sandbox: Sandbox, name: str, *, spoil: bool) -> tuple[Evaluation, list[str]]:
        c = self.config
        left = running.left(outcome.remaining)
        kept: list[str] = []
        if outcome.changes is not None:
            own = [c.tests, c.logs, "/logs", "/solution", "/oracle", *c.exclude]
            if c.state != "/":
                own = [p[len(c.state) :].strip("/") for p in own if p.startswith(c.state.rstrip("/") + "/")]
            kept = state.restore(sandbox, outcome.changes, own, sandbox.ref.workdir, left)
        spoiled = self._spoil(sandbox, left) if spoil else 0
        # The verifier's folder is the judge's own: what the image had there is gone.
        sandbox.write(f"{c.logs}/.fresh", b"")
        made = sandbox.exec(["find", c.logs, "-mindepth", "1", "-delete"], cwd="/", timeout=left)
        if made.exit_code != 0:
            raise EvaluatorError(f"can't clear {c.logs}: {tail(made)}", code="prepare_failed")
        spec = outcome.task.evaluator
        result = sandbox.exec(
            c.command,
            env={**(spec.env if spec else {}), **c.env},
            cwd=c.cwd,
            timeout=min(c.timeout_seconds or float("inf"), running.left(outcome.remaining)),
            log=outcome.logs / f"{name}.log",
        )
        sandbox.stop()
        evaluation = self._read(sandbox, result)
        if spoil:
            evaluation.report["spoiled"] = spoiled
        return evaluation, kept

    def _spoil(self, sandbox: Sandbox, left: float) -> int:
        """Every Python test fails at its start; how many there are."""
        import random

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

    def _read(self, sandbox: Sandbox, result: ExecResult) -> Evaluation:
        c, code = self.config, result.exit_code
        report: dict[str, Any] = {"exit_code": code, "seconds": round(result.seconds, 3)}
        excuse: Excuse | None = None
        if result.timed_out:
            own = c.timeout_seconds is not None and result.seconds >= c.timeout_seconds - 0.5
            excuse = "timeout" if own else None
            error = EvaluatorError(
                f"the verifier ran {result.seconds:.1f} s: {tail(result)}", code="evaluation_timeout"
            )
        elif (metrics := self._metrics(sandbox)) is not None:
            reward = metrics.get(c.reward_key, next(iter(metrics.values())) if len(metrics) == 1 else None)
            if reward is not None:
                return _evaluation(reward, report | ({"metrics": metrics} if len(metrics) > 1 else {}))
            error = EvaluatorError(f"reward.json has no '{c.reward_key}': {sorted(metrics)[:10]}", code="no_report")
            excuse = "no_report"
        elif code is None or code < 0 or code in c.crash_exit_codes:
            excuse, error = "crash", EvaluatorError(f"exit code {code}: {tail(result)}", code="tests_crashed")
        else:
            message = f"no reward.txt or reward.json with numbers in {c.logs}: {tail(result)}"
            excuse, error = "no_report", EvaluatorError(message, code="no_report")
        if excuse not in c.treat_as_failed:
            raise error
        return _evaluation(0.0, report | {"reason": error.code, "message": error.message})

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
