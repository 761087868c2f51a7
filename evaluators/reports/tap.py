"""`tap`: Test Anything Protocol (12 to 14), with subtests, in the command's output."""

from __future__ import annotations

import re

from evaluators.reports.findings import Findings, ReportError, Status, collect, text_of

_TEST = re.compile(r"^( *)(not )?ok\b *(\d*) *(?:- )?(.*)$")
_PLAN = re.compile(r"^( *)1\.\.(\d+)(?: *#.*)?$")
_SUBTEST = re.compile(r"^( *)# Subtest: (.*)$")
_DIRECTIVE = re.compile(r"(?<!\\)#\s*(skip|todo)\b.*$", re.IGNORECASE)
_TIME = re.compile(r"\s+# time=\S+$")

BAIL_OUT = "Bail out!"
PLAN = "1..N"


def parse(data: bytes) -> Findings:
    """Status by description (the number where there is none); a subtest's id is `parent > child`.

    A bail-out, and a plan that announced another number of tests than came, are results of their own with status
    `error`, under the ids `Bail out!` and `1..N`. Raises ReportError without a single TAP line.
    """
    results: list[tuple[str, Status]] = []
    names: dict[int, str] = {}  # open subtest by nesting level of its children
    pending: list[tuple[int, str]] = []
    planned: int | None = None
    top = 0
    for line in text_of(data).splitlines():
        line = line.rstrip()
        if line.lstrip().startswith("Bail out!"):
            results.append((BAIL_OUT, "error"))
            break
        if m := _SUBTEST.match(line):
            pending.append((len(m[1]) // 4, m[2]))
            continue
        m = _TEST.match(line)
        if m is None:
            plan = _PLAN.match(line)
            if plan and not plan[1]:
                planned = int(plan[2][:9])
            continue
        level = len(m[1]) // 4
        # The comment stands at the parent's indentation, or (older writers) already at the children's.
        shift = 1 if pending and pending[0][0] == 0 else 0
        names.update((at + shift, name) for at, name in pending)
        pending.clear()
        names = {at: name for at, name in names.items() if at <= level}
        top += level == 0
        path = [names[at] for at in range(1, level + 1) if at in names]
        results.append((" > ".join([*path, _description(m[4]) or m[3] or "?"]), _status(m[2], m[4])))
    if not results and planned is None:
        raise ReportError("no TAP lines in the output")
    if planned is not None and planned != top and (BAIL_OUT, "error") not in results:
        results.append((PLAN, "error"))
    return Findings(tests=collect(results))


def _description(text: str) -> str:
    return _TIME.sub("", _DIRECTIVE.sub("", text)).strip()


def _status(negated: str | None, text: str) -> Status:
    directive = _DIRECTIVE.search(text)
    kind = directive[1].lower() if directive else ""
    if kind == "skip":
        return "skipped"
    if kind == "todo":
        return "xfailed" if negated else "passed"
    return "failed" if negated else "passed"
