"""`swebench`: test output as the `swebench` package's parsers read it. Needs the extra `swe`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

from evaluators.reports import Report
from evaluators.reports.findings import Findings, ReportError, Status, collect, text_of
from polar.errors import InvalidTask

_STATUS: dict[str, Status] = {
    "PASSED": "passed", "XFAIL": "xfailed", "SKIPPED": "skipped", "FAILED": "failed", "ERROR": "error",
}  # fmt: skip
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"


class SwebenchLog(Report, kw_only=True, frozen=True, tag="swebench"):
    """`parser`: a name in the package's registry; a few of them look at `version` and `instance_id`. `eval_type`
    `fail_only`: the parser names failing tests only, so a test that isn't named has passed."""

    parser: str
    eval_type: Literal["pass_and_fail", "fail_only"] = "pass_and_fail"
    version: str = ""
    instance_id: str = ""

    def __post_init__(self) -> None:
        registry = parsers()
        if self.parser not in registry:
            raise ValueError(f"'{self.parser}' is no log parser of swebench; allowed: {', '.join(sorted(registry))}")

    def source(self) -> Literal["exit_code", "output", "file"]:
        return "output"

    def parse(self, data: bytes) -> Findings:
        text = text_of(data)
        if START in text and END in text:
            text = text.split(START)[1].split(END)[0]
        try:
            # Parsers get the package's own description of a test; none reads more of it than this.
            found = parsers()[self.parser](text, SimpleNamespace(version=self.version, instance_id=self.instance_id))
        except Exception as e:
            raise ReportError(f"swebench's '{self.parser}' can't read the output: {type(e).__name__}: {e}") from e
        if not found and (self.eval_type == "pass_and_fail" or not suite_ran(text)):
            raise ReportError(f"swebench's '{self.parser}' finds no test in the output")
        return Findings(tests=collect((str(t), _STATUS.get(str(s), "error")) for t, s in found.items()))


def parsers() -> dict[str, Callable[[str, Any], dict[str, str]]]:
    """Raises InvalidTask without the package."""
    try:
        return importlib.import_module("swebench.harness.log_parsers").PARSER_REGISTRY
    except (ImportError, AttributeError) as e:
        raise InvalidTask(
            f"evaluator.config.report: kind 'swebench' needs the extra 'swe' (pip install 'polar-rollout[swe]'): {e}"
        ) from e


def suite_ran(text: str) -> bool:
    return bool(importlib.import_module("swebench.harness.grading").SUITE_RAN.search(text))
