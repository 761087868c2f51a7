"""`test_on_output`: run a command over what the agent left, in a fresh sandbox, and read its report."""

from __future__ import annotations

import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from evaluators import grading
from evaluators.config import check_path, read
from evaluators.placing import clear, inside, restore
from evaluators.reports import FRESH, MAX_BYTES, AnyReport, ExitCode, ReportError
from polar.errors import EvaluatorError, InvalidTask, NotFound
from polar.judge import Outcome
from polar.result import Evaluation
from polar.sandbox import ExecResult, Sandbox
from polar.task import Env, Seconds

# The end of the output that is kept for reports printed there.
_OUTPUT_LIMIT = 8 * 1024 * 1024

Excuse = Literal["timeout", "crash", "no_report"]


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
    not the evaluator's; for tests that run the agent's code and can be hung or killed by it."""

    command: Annotated[str, Meta(min_length=1)]
    cwd: str | None = None
    env: Env = field(default_factory=dict)
    timeout_seconds: Seconds | None = None
    files: list[TestFile] = field(default_factory=list)
    collect: list[str] = field(default_factory=list)
    report: AnyReport = field(default_factory=ExitCode)
    crash_exit_codes: list[int] = field(default_factory=lambda: [126, 127, 137])
    treat_as_failed: list[Excuse] = field(default_factory=list)


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
        missing = restore(sandbox, self.config.collect, outcome.artifacts)
        report_path = self._place(sandbox, outcome)
        result = self._run(sandbox, outcome, report_path)
        excuse, error = self._accident(result)
        if error is None:
            try:
                evaluation = self._read(sandbox, report_path, result)
            except ReportError as e:
                excuse, error = "no_report", EvaluatorError(f"{e}{_tail(result)}", code="no_report")
        if error is not None:
            if excuse not in self.config.treat_as_failed:
                raise error
            evaluation = grading.failed(f"{error.code}: {error.message}")
        evaluation.evaluator = self.name
        evaluation.report["seconds"] = round(result.seconds, 3)
        if missing:
            evaluation.report["missing_artifacts"] = missing
        if result.output_bytes > len(result.output):
            evaluation.report["output_truncated"] = True
        return evaluation

    def _place(self, sandbox: Sandbox, outcome: Outcome) -> str:
        """Tests over the agent's files, and a place for the report where no file can have been planted."""
        fresh = inside(sandbox, f".polar-{secrets.token_hex(16)}/report")
        wanted = getattr(self.config.report, "path", FRESH)
        targets = [f.target for f in self.config.files] + ([] if wanted == FRESH else [wanted])
        clear(sandbox, targets, self.config.collect, _left(outcome))
        for f in self.config.files:
            sandbox.write(f.target, f.content.encode(), mode=f.mode)
        made = sandbox.exec(["mkdir", "-p", fresh.rpartition("/")[0]], timeout=_left(outcome))
        if made.exit_code != 0:
            raise EvaluatorError(f"can't make a place for the report{_tail(made)}")
        return fresh if wanted == FRESH else inside(sandbox, wanted)

    def _run(self, sandbox: Sandbox, outcome: Outcome, report_path: str) -> ExecResult:
        spec = outcome.task.evaluator
        return sandbox.exec(
            self.config.command,
            env={**(spec.env if spec else {}), **self.config.env, "POLAR_REPORT": report_path},
            cwd=self.config.cwd,
            timeout=min(self.config.timeout_seconds or float("inf"), _left(outcome)),
            log=outcome.logs / "tests.log",
            output_limit=_OUTPUT_LIMIT,
        )

    def _accident(self, result: ExecResult) -> tuple[Excuse | None, EvaluatorError | None]:
        """The tests did not come to an end of their own."""
        code = result.exit_code
        if result.timed_out:
            error = EvaluatorError(f"tests ran {result.seconds:.1f} s{_tail(result)}", code="evaluation_timeout")
            # Only its own limit tells something about the tests; the evaluation's budget may have gone elsewhere.
            own = self.config.timeout_seconds
            return ("timeout" if own is not None and result.seconds >= own - 0.5 else None), error
        if result.cancelled:
            return None, EvaluatorError("cancelled while the tests ran")
        if code is None or code < 0 or code in self.config.crash_exit_codes:
            return "crash", EvaluatorError(f"tests ended with exit code {code}{_tail(result)}", code="tests_crashed")
        return None, None

    def _read(self, sandbox: Sandbox, report_path: str, result: ExecResult) -> Evaluation:
        report, code = self.config.report, result.exit_code
        assert code is not None
        source = report.source()
        if source == "exit_code":
            return grading.by_exit_code(code)
        if source == "output":
            return grading.grade(report.parse(result.output), self.config, code)
        # What the tests left running could still write the report.
        sandbox.stop()
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "report"
            try:
                truncated = sandbox.download(report_path, target, limit=MAX_BYTES)
            except NotFound:
                raise ReportError(f"the command wrote no report at {report_path}") from None
            if truncated or target.is_symlink() or not target.is_file():
                raise ReportError(f"report at {report_path} is not a file of at most {MAX_BYTES} bytes")
            return grading.grade(report.parse(target.read_bytes()), self.config, code)


def _left(outcome: Outcome) -> float:
    left = outcome.remaining()
    if left <= 0:
        raise EvaluatorError("no time left to evaluate", code="evaluation_timeout")
    return left


def _tail(result: ExecResult) -> str:
    """The end of the output, for the message of an error."""
    text = result.output[-500:].decode("utf-8", "replace").strip()
    return f"; output ends: {text}" if text else ""
