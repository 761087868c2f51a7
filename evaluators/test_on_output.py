"""`test_on_output`: run a command over what the agent left, in a fresh sandbox, and read its report."""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from evaluators import controls, grading, running, spoiling
from evaluators.config import check_path, read
from evaluators.controls import ControlRules, Edit
from evaluators.placing import clear, inside, restore, without_hooks
from evaluators.reports import FRESH, AnyReport, ExitCode, Status
from evaluators.running import CRASH_CODES, Excuse, Ran
from polar.errors import EvaluatorError, InvalidTask
from polar.judge import Outcome
from polar.result import Evaluation
from polar.sandbox import Sandbox
from polar.task import Env, Seconds


class TestFile(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A file that only the judge's sandbox ever sees."""

    target: str
    content: str
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644


class Config(grading.Rules, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`command` runs in `cwd` (default: the sandbox's working directory) with `env` and $POLAR_REPORT, the path of a
    report file. `collect`: paths taken from the agent's sandbox and restored at the same place, before `files`.
    `timeout_seconds` bounds the command alone. `crash_exit_codes` mean that the tests did not run (not found, not
    executable, killed). `treat_as_failed`: which of timeout, crash, no_report is the agent's failure (reward 0) and
    not the evaluator's; for tests that run the agent's code and can be hung or killed by it. `controls`: success by tests in
    Python `files` is checked by control runs. `protect_hooks`: what starts with a test runner or an interpreter is taken out
    of collected folders."""

    command: Annotated[str, Meta(min_length=1)]
    cwd: str | None = None
    env: Env = field(default_factory=dict)
    timeout_seconds: Seconds | None = None
    files: list[TestFile] = field(default_factory=list)
    collect: list[str] = field(default_factory=list)
    report: AnyReport = field(default_factory=ExitCode)
    crash_exit_codes: list[int] = field(default_factory=lambda: list(CRASH_CODES))
    treat_as_failed: list[Excuse] = field(default_factory=list)
    controls: ControlRules = field(default_factory=ControlRules)
    protect_hooks: bool = True


class TestOnOutput:
    """Codes of its EvaluatorErrors: `tests_crashed`, `evaluation_timeout`, `no_report`."""

    __test__ = False  # the name begins like a test of pytest's

    name = "test_on_output"
    needs_sandbox = True

    def __init__(self, config: Config):
        self.config = config
        self.collects: tuple[str, ...] = tuple(config.collect)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TestOnOutput:
        c = read(config, Config, cls.name)
        for n, file in enumerate(c.files):
            check_path(file.target, f"files[{n}].target")
        for n, path in enumerate(c.collect):
            check_path(path, f"collect[{n}]", folder=True)
        if isinstance(c.report, ExitCode) and (c.required or c.forbidden or c.optional or c.partial_credit):
            raise InvalidTask(
                "evaluator.config.report: kind 'exit_code' knows no single tests, which required, forbidden, optional and "
                "partial_credit are about; use junit, pytest, tap or regex"
            )
        for one, other in (("required", "forbidden"), ("required", "optional"), ("forbidden", "optional")):
            both = sorted(set(getattr(c, one)) & set(getattr(c, other)))
            if both:
                raise InvalidTask(f"evaluator.config.{one}: '{both[0]}' stands in {other} too")
        return cls(c)

    def evaluate(self, outcome: Outcome) -> Evaluation:
        sandbox = outcome.sandbox()
        hooks = without_hooks(sandbox, self.config.collect, outcome.artifacts) if self.config.protect_hooks else []
        ran, missing = self._run(outcome, sandbox, "tests")
        evaluation = self._judge(ran)
        if (evaluation.outcome_reward or 0) > self.config.controls.floor and ran.findings is not None:
            evaluation = self._confirm(outcome, evaluation, ran.findings.tests)
        if hooks:
            evaluation.report["protected"] = hooks[:50]
        evaluation.evaluator = self.name
        evaluation.report["seconds"] = round(ran.result.seconds, 3)
        if missing:
            evaluation.report["missing_artifacts"] = missing
        if ran.result.output_bytes > len(ran.result.output):
            evaluation.report["output_truncated"] = True
        return evaluation

    def _judge(self, ran: Ran) -> Evaluation:
        if ran.error is not None:
            if ran.excuse not in self.config.treat_as_failed:
                raise ran.error
            return grading.failed(f"{ran.error.code}: {ran.error.message}")
        assert ran.findings is not None and ran.result.exit_code is not None
        if isinstance(self.config.report, ExitCode):
            return grading.by_exit_code(ran.result.exit_code)
        return grading.grade(ran.findings, self.config, ran.result.exit_code)

    def _confirm(self, outcome: Outcome, evaluation: Evaluation, tests: dict[str, Status]) -> Evaluation:
        c, another = self.config, outcome.another
        if another is None or not c.controls.trials:
            return evaluation

        def again(edit: Edit, name: str) -> Ran:
            with running.passing(another()) as sandbox:
                return self._run(outcome, sandbox, name, edit)[0]

        if not tests:
            return self._confirm_whole(evaluation, again)

        def trial(edit: Edit, name: str) -> dict[str, Status] | None:
            ran = again(edit, name)
            if ran.error is not None and ran.excuse in (None, "timeout"):
                raise ran.error
            return ran.findings.tests if ran.findings else None

        claimed = [t for t in c.required or tests if tests.get(t) == "passed"]
        try:
            done = controls.check(c.controls, tests, claimed, [], trial, broken=False)
        except controls.Tampered as e:
            return grading.failed(f"tampered: {e}", c.controls.tampered_reward)
        except controls.Unconfirmed as e:
            return grading.failed(f"unconfirmed: {e}")
        if done:
            evaluation.report["controls"] = done
        return evaluation

    def _confirm_whole(self, evaluation: Evaluation, again: Callable[[Edit, str], Ran]) -> Evaluation:
        """A report without single tests: with every Python test spoiled, it can't be as good."""
        spoiled = 0

        def edit(path: str, source: bytes) -> bytes:
            nonlocal spoiled
            out, found = spoiling.spoil(source, spoiling.functions(source), random.Random(), certain=True)
            spoiled += len(found)
            return out

        if not any(spoiling.functions(f.content.encode()) for f in self.config.files):
            return evaluation
        ran = again(edit, "control1")
        if ran.error is not None and ran.excuse in (None, "timeout"):
            raise ran.error
        reward = None if ran.error is not None else self._judge(ran).outcome_reward
        if spoiled and (reason := controls.not_lower(reward, evaluation.outcome_reward)):
            fee = self.config.controls.tampered_reward if reason == "tampered" else 0.0
            return grading.failed(f"{reason}: {controls.AS_GOOD}", fee)
        evaluation.report["controls"] = {"trials": 1, "tests": spoiled, "kind": "spoiled"}
        return evaluation

    def _run(self, outcome: Outcome, sandbox: Sandbox, name: str, edit: Edit | None = None) -> tuple[Ran, list[str]]:
        """The command over what was collected, and which of that is missing."""
        c, spec = self.config, outcome.task.evaluator

        def left() -> float:
            return running.left(outcome.remaining)

        missing = restore(sandbox, c.collect, outcome.artifacts)
        report_path = self._place(sandbox, left(), edit)
        ran = running.run(
            sandbox,
            c.command,
            c.report,
            report_path=report_path,
            env={**(spec.env if spec else {}), **c.env},
            cwd=c.cwd,
            limit=c.timeout_seconds,
            left=left,
            log=outcome.logs / f"{name}.log",
            crash_codes=c.crash_exit_codes,
        )
        return ran, missing

    def _place(self, sandbox: Sandbox, left: float, edit: Edit | None) -> str:
        """Tests over the agent's files, and a place for the report where no file can have been planted."""
        fresh = inside(sandbox, f".polar-{secrets.token_hex(16)}/report")
        wanted = getattr(self.config.report, "path", FRESH)
        targets = [f.target for f in self.config.files] + ([] if wanted == FRESH else [wanted])
        clear(sandbox, targets, self.config.collect, left)
        for f in self.config.files:
            source = f.content.encode()
            sandbox.write(f.target, edit(f.target, source) if edit else source, mode=f.mode)
        made = sandbox.exec(["mkdir", "-p", fresh.rpartition("/")[0]], timeout=left)
        if made.exit_code != 0:
            raise EvaluatorError(f"can't make a place for the report: {made.output[-300:].decode('utf-8', 'replace')}")
        return fresh if wanted == FRESH else inside(sandbox, wanted)
