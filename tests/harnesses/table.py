"""The table in docs/harnesses.md, made from the report of `make harnesses`: python -m tests.harnesses.table REPORT PAGE

Only of a whole run: a page that lost the rows of what wasn't run would say that it can't be done.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from harness_adapters.versions import versions
from tests.harnesses.cases import DOCKER, LOCAL

BEGIN, END = "<!-- table: make harnesses -->", "<!-- end of table -->"
ORDER = [
    "multi_turn",
    "subagent",
    "compaction",
    "timeout",
    "outage",
    "overflow",
    "background",
    "denied",
    "mended",
    "long_output",
]
NO_DOCKER = "In Docker sandboxes: no run, for want of an engine or of the image polar-sandbox:base."
FIELDS = {
    "harness", "version", "dialect", "scenario", "ok", "termination", "turns", "chains", "continuity", "breaks",
    "foreign_hosts", "sampled_tokens", "accounted_tokens", "runtime",
}  # fmt: skip


def render(rows: list[dict[str, Any]]) -> str:
    """A line per CLI and dialect, a column per scenario; then what came of the runs in Docker, and the reasons for every break."""
    for r in rows:
        if missing := FIELDS - r.keys():
            raise ValueError(
                f"the report's row of {r.get('harness')}, {r.get('scenario')} lacks {', '.join(sorted(missing))}"
            )
    if unknown := {r["scenario"] for r in rows} - set(ORDER):
        raise ValueError(f"the table has no column for {', '.join(sorted(unknown))}")
    docker = [r for r in rows if r["runtime"] != "local"]
    total = sum(r["sampled_tokens"] for r in rows), sum(r["accounted_tokens"] for r in rows)
    rows = [r for r in rows if r["runtime"] == "local"]
    scenarios = [s for s in ORDER if any(r["scenario"] == s for r in rows)]
    lines = [
        "| CLI | version | dialect | " + " | ".join(scenarios) + " | foreign hosts |",
        "|---" * (len(scenarios) + 4) + "|",
    ]
    for harness, version, dialect in sorted({(r["harness"], r["version"], r["dialect"]) for r in rows}):
        mine = {r["scenario"]: r for r in rows if (r["harness"], r["dialect"]) == (harness, dialect)}
        cells = [_cell(mine.get(s)) for s in scenarios]
        hosts = sorted({h for r in mine.values() for h in r["foreign_hosts"] or ()})
        watched = all(r["foreign_hosts"] is not None for r in mine.values())
        seen = ", ".join(hosts) or ("none" if watched else "not watched")
        lines.append(f"| {harness} | {version} | {dialect} | {' | '.join(cells)} | {seen} |")
    notes = [
        f"- {r['harness']} ({r['dialect']}), {r['scenario']}: {n} × {reason}"
        for r in rows
        for reason, n in sorted(r["breaks"].items())
    ]
    lines += ["", *_docker(docker)]
    lines += ["", f"Tokens sampled by the scripted engine: {total[0]}; accounted for in the results: {total[1]}."]
    return "\n".join([*lines, *(["", "Where a turn continued no earlier one:", "", *notes] if notes else [])]) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    if not row["termination"]:
        return "**failed**: no result"
    what = f"{row['turns']} turns, {row['chains']} chain{'s' * (row['chains'] != 1)}, {row['continuity']:.0%}"
    end = "" if row["termination"] == "finished" else f", {row['termination']}"
    return f"{'ok' if row['ok'] else '**failed**'}: {what}{end}"


def _docker(rows: list[dict[str, Any]]) -> list[str]:
    """How many runs came to their end as they had to, by the CLI's way into the sandbox, and which didn't."""
    if not rows:
        return [NO_DOCKER]
    ways = {r["runtime"]: [x["ok"] for x in rows if x["runtime"] == r["runtime"]] for r in rows}
    counts = "; ".join(f"{way.removeprefix('docker, ')}: {sum(ok)} of {len(ok)} ok" for way, ok in ways.items())
    failed = [f"- {r['harness']} ({r['runtime']}), {r['scenario']}: {_cell(r)}" for r in rows if not r["ok"]]
    return [f"In Docker sandboxes: {counts}.", *(["", *failed] if failed else [])]


def lacking(rows: list[dict[str, Any]]) -> list[str]:
    """What a whole run has and this report hasn't. A machine without Docker has none of its runs, any other all."""
    there = {(r["harness"], r["version"], r["dialect"], r["scenario"], r["runtime"]) for r in rows}
    pinned = {name: h.version for name, h in versions().harnesses.items()}
    cases = [*LOCAL, *DOCKER] if any(r["runtime"] != "local" for r in rows) else LOCAL
    whole = {(c.cli.harness, pinned[c.cli.harness], c.cli.dialect, c.scenario.name, c.runtime) for c in cases}
    return [" ".join(row) for row in sorted(whole - there)]


def place(page: str, table: str) -> str:
    head, _, tail = _parts(page)
    return f"{head}{BEGIN}\n\n{table}\n{END}{tail}"


def lines_of(page: str) -> list[tuple[str, str, str]]:
    """(CLI, version, dialect) of every line of the page's table."""
    return re.findall(r"^\| (\w+) \| (\d\S*) \| (\w+) \|", _parts(page)[1], re.M)


def _parts(page: str) -> tuple[str, str, str]:
    """What is before, in and after the table's place."""
    head, begin, rest = page.partition(BEGIN)
    table, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table between {BEGIN!r} and {END!r}")
    return head, table, tail


def main() -> None:
    report, page = map(Path, sys.argv[1:3])
    rows = json.loads(report.read_text()) if report.is_file() else []
    if missing := lacking(rows):
        sys.exit(f"{page} stays as it is: {report} lacks {len(missing)} runs, the first of them {missing[0]}")
    if NO_DOCKER in (table := render(rows)):
        print(f"{page}: {NO_DOCKER}", file=sys.stderr)
    page.write_text(place(page.read_text(), table))


if __name__ == "__main__":
    main()
