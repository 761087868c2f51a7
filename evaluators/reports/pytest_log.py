"""`pytest`: the short summary that `pytest -rA` prints at the end of its output."""

from __future__ import annotations

import re
from collections.abc import Iterator

from evaluators.reports.findings import Findings, ReportError, Status, collect, text_of

_HEADER = re.compile(r"^=+ short test summary info =+$")
_LINE = re.compile(r"^(PASSED|FAILED|ERROR|XFAIL|XPASS) (.+)$")
_STATUS: dict[str, Status] = {
    "PASSED": "passed",
    "XPASS": "passed",  # a strict one is reported as FAILED
    "FAILED": "failed",
    "ERROR": "error",
    "XFAIL": "xfailed",
}


def parse(data: bytes) -> Findings:
    """Status by node id. Only the last summary says which tests ran (captured output of a test stands before it);
    earlier ones can make a status worse, never better. Skipped tests have no id there. Raises ReportError without one.
    """
    sections: list[list[str]] = []
    for line in text_of(data).splitlines():
        line = line.rstrip()
        if _HEADER.match(line):
            sections.append([])
        elif sections:
            sections[-1].append(line)
    if not sections:
        raise ReportError("no 'short test summary info' in the output (does the command run pytest with -rA?)")
    last = collect(_results(sections[-1]))
    earlier = [r for section in sections[:-1] for r in _results(section) if r[0] in last]
    return Findings(tests=collect([*last.items(), *earlier]))


def _results(lines: list[str]) -> Iterator[tuple[str, Status]]:
    for line in lines:
        if line.startswith("===="):
            return
        m = _LINE.match(line)
        if m:
            # A passed test has no message, so nothing has to be told apart from its id.
            yield m[2] if m[1] == "PASSED" else _node_id(m[2]), _STATUS[m[1]]


def _node_id(rest: str) -> str:
    """The id before ` - message`; a parameter in brackets may hold the same separator."""
    at = rest.find(" - ")
    while at >= 0:
        head = rest[:at]
        if head.count("[") <= head.count("]"):
            return head
        at = rest.find(" - ", at + 1)
    # Unbalanced brackets: a message that was cut, or a parameter that holds one.
    bracket = rest.find("]")
    at = rest.find(" - ", bracket) if bracket >= 0 else rest.find(" - ")
    return rest[:at] if at >= 0 else rest
