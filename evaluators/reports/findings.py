"""What a report says, in one form for every kind."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct, field

Status = Literal["passed", "xfailed", "skipped", "failed", "error"]

# From best to worst.
_ORDER: tuple[Status, ...] = ("passed", "xfailed", "skipped", "failed", "error")

# Bounds on what a report may hold: the agent's code runs where it is written.
MAX_BYTES = 32 * 1024 * 1024
MAX_TESTS = 200_000
MAX_ID = 4096

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class ReportError(ValueError):
    """The report is missing, malformed or over a bound: nothing can be read from it."""


class Findings(Struct, kw_only=True, frozen=True):
    """`tests`: status by full test id. `reward`: given by the report itself, for kinds that do."""

    tests: dict[str, Status] = field(default_factory=dict)
    reward: float | None = None


def collect(results: Iterable[tuple[str, Status]]) -> dict[str, Status]:
    """One status per id; an id that is reported twice keeps its worst: a good line can't hide a bad one."""
    out: dict[str, Status] = {}
    for test, status in results:
        if len(test) > MAX_ID:
            raise ReportError(f"a test id of {len(test)} characters (at most {MAX_ID})")
        known = out.get(test)
        if known is None or _ORDER.index(status) > _ORDER.index(known):
            out[test] = status
        if len(out) > MAX_TESTS:
            raise ReportError(f"more than {MAX_TESTS} tests")
    return out


def text_of(data: bytes) -> str:
    """Report text: bounded, with colours removed, undecodable bytes replaced."""
    if len(data) > MAX_BYTES:
        raise ReportError(f"report of {len(data)} bytes (at most {MAX_BYTES})")
    text = data.decode("utf-8", "replace")
    return _ANSI.sub("", text) if "\x1b" in text else text
