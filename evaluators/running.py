"""One run of a test command, and what came of it."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from evaluators.reports import MAX_BYTES, Findings, Report, ReportError
from polar.errors import EvaluatorError, NotFound
from polar.sandbox import ExecResult, Sandbox

_log = logging.getLogger("polar.evaluators")

# The end of the output that is kept for reports printed there.
OUTPUT_LIMIT = 8 * 1024 * 1024
CRASH_CODES = [126, 127, 137]

Excuse = Literal["timeout", "crash", "no_report"]


class Ran(Struct, kw_only=True):
    """Either `findings`, or `error` with, where it can be the tests' own doing, its `excuse`."""

    result: ExecResult
    findings: Findings | None = None
    excuse: Excuse | None = None
    error: EvaluatorError | None = None


@contextlib.contextmanager
def passing(sandbox: Sandbox) -> Iterator[Sandbox]:
    """A sandbox that goes right after. That it can't be removed costs no judgement: who made it removes what is left."""
    try:
        yield sandbox
    finally:
        try:
            sandbox.destroy()
        except Exception as e:
            _log.warning("sandbox %s is left: %s: %s", sandbox.ref.handle, type(e).__name__, e)


def run(
    sandbox: Sandbox,
    command: str,
    report: Report,
    *,
    report_path: str,
    env: dict[str, str],
    cwd: str | None,
    limit: float | None,
    left: Callable[[], float],
    log: Path,
    crash_codes: list[int],
) -> Ran:
    """`limit` bounds the command alone. Nothing runs in the sandbox any more when a report file is read."""
    result = sandbox.exec(
        command,
        env={**env, "POLAR_REPORT": report_path},
        cwd=cwd,
        timeout=min(limit or float("inf"), left()),
        log=log,
        output_limit=OUTPUT_LIMIT,
    )
    ran = _accident(result, limit, crash_codes)
    if ran.error is None:
        try:
            ran.findings = read(sandbox, report, report_path, result)
        except ReportError as e:
            ran.excuse, ran.error = "no_report", EvaluatorError(f"{e}{_tail(result)}", code="no_report")
    return ran


def _accident(result: ExecResult, limit: float | None, crash_codes: list[int]) -> Ran:
    """The tests did not come to an end of their own."""
    code = result.exit_code
    if result.timed_out:
        error = EvaluatorError(f"tests ran {result.seconds:.1f} s{_tail(result)}", code="evaluation_timeout")
        # Only its own limit tells something about the tests; the evaluation's budget may have gone elsewhere.
        own = limit is not None and result.seconds >= limit - 0.5
        return Ran(result=result, excuse="timeout" if own else None, error=error)
    if result.cancelled:
        return Ran(result=result, error=EvaluatorError("cancelled while the tests ran"))
    if code is None or code < 0 or code in crash_codes:
        error = EvaluatorError(f"tests ended with exit code {code}{_tail(result)}", code="tests_crashed")
        return Ran(result=result, excuse="crash", error=error)
    return Ran(result=result)


def read(sandbox: Sandbox, report: Report, path: str, result: ExecResult) -> Findings:
    """Raises ReportError."""
    if report.source() == "exit_code":
        return Findings()
    if report.source() == "output":
        return report.parse(result.output)
    # What the tests left running could still write the report.
    sandbox.stop()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "report"
        try:
            truncated = sandbox.download(path, target, limit=MAX_BYTES)
        except NotFound:
            raise ReportError(f"the command wrote no report at {path}") from None
        if truncated or target.is_symlink() or not target.is_file():
            raise ReportError(f"report at {path} is not a file of at most {MAX_BYTES} bytes")
        return report.parse(target.read_bytes())


def share(budget: float, runs: int) -> float:
    """Seconds for one run where `runs` of them must fit into an evaluation's budget. From the whole budget, not from what
    is left of it: how long tests may take must not depend on what went wrong before."""
    return budget / runs


def left(remaining: Callable[[], float]) -> float:
    """Raises EvaluatorError when nothing is left."""
    seconds = remaining()
    if seconds <= 0:
        raise EvaluatorError("no time left to evaluate", code="evaluation_timeout")
    return seconds


def _tail(result: ExecResult) -> str:
    """The end of the output, for the message of an error."""
    text = result.output[-500:].decode("utf-8", "replace").strip()
    return f"; output ends: {text}" if text else ""
