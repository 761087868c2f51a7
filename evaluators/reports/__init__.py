"""Kinds of reports: where each is read from, and how. Parsers are pure; all raise ReportError and nothing else."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from evaluators.config import check_path
from evaluators.reports import junit, pytest_log, regex, reward_file, tap
from evaluators.reports.findings import MAX_BYTES, Findings, ReportError, Status

Source = Literal["exit_code", "output", "file"]

# Stands for the path that the evaluator makes up for each run.
FRESH = "$POLAR_REPORT"


class Report(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True, tag_field="kind"):
    def source(self) -> Source:
        raise NotImplementedError

    def parse(self, data: bytes) -> Findings:
        raise NotImplementedError


class ExitCode(Report, kw_only=True, frozen=True, tag="exit_code"):
    """Reward 1 for exit code 0, else 0."""

    def source(self) -> Source:
        return "exit_code"

    def parse(self, data: bytes) -> Findings:
        return Findings()


class _OutputReport(Report, kw_only=True, frozen=True):
    def source(self) -> Source:
        return "output"


class Pytest(_OutputReport, kw_only=True, frozen=True, tag="pytest"):
    def parse(self, data: bytes) -> Findings:
        return pytest_log.parse(data)


class Tap(_OutputReport, kw_only=True, frozen=True, tag="tap"):
    def parse(self, data: bytes) -> Findings:
        return tap.parse(data)


class Regex(_OutputReport, kw_only=True, frozen=True, tag="regex"):
    pattern: str

    def __post_init__(self) -> None:
        regex.compile_pattern(self.pattern)

    def parse(self, data: bytes) -> Findings:
        return regex.parse(data, regex.compile_pattern(self.pattern))


class _FileReport(Report, kw_only=True, frozen=True):
    """`path`: where the command writes it; by default the value of $POLAR_REPORT, which nobody can know beforehand."""

    path: str = FRESH

    def __post_init__(self) -> None:
        if self.path != FRESH:
            check_path(self.path, "report.path")

    def source(self) -> Source:
        return "file"


class Junit(_FileReport, kw_only=True, frozen=True, tag="junit"):
    def parse(self, data: bytes) -> Findings:
        return junit.parse(data)


class RewardFile(_FileReport, kw_only=True, frozen=True, tag="reward_file"):
    def parse(self, data: bytes) -> Findings:
        return reward_file.parse(data)


AnyReport = ExitCode | Junit | Pytest | Tap | Regex | RewardFile

__all__ = ["FRESH", "MAX_BYTES", "AnyReport", "ExitCode", "Findings", "ReportError", "Status"]
