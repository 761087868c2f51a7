"""The table in docs/harnesses.md, made from the report of `make harnesses`: python -m tests.harnesses.table REPORT PAGE"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- table: make harnesses -->", "<!-- end of table -->"
ORDER = ["multi_turn", "subagent", "compaction", "timeout", "outage", "overflow"]
FIELDS = {
    "harness", "version", "dialect", "scenario", "ok", "termination", "turns", "chains", "continuity", "breaks",
    "foreign_hosts", "sampled_tokens", "accounted_tokens",
}  # fmt: skip


def render(rows: list[dict[str, Any]]) -> str:
    """A line per CLI and dialect, a column per scenario, then the reasons for every break."""
    for r in rows:
        if missing := FIELDS - r.keys():
            raise ValueError(
                f"the report's row of {r.get('harness')}, {r.get('scenario')} lacks {', '.join(sorted(missing))}"
            )
    if unknown := {r["scenario"] for r in rows} - set(ORDER):
        raise ValueError(f"the table has no column for {', '.join(sorted(unknown))}")
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
    total = sum(r["sampled_tokens"] for r in rows), sum(r["accounted_tokens"] for r in rows)
    lines += ["", f"Tokens sampled by the scripted engine: {total[0]}; accounted for in the results: {total[1]}."]
    return "\n".join([*lines, *(["", "Where a turn continued no earlier one:", "", *notes] if notes else [])]) + "\n"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    what = f"{row['turns']} turns, {row['chains']} chain{'s' * (row['chains'] != 1)}, {row['continuity']:.0%}"
    end = "" if row["termination"] == "finished" else f", {row['termination']}"
    return f"{'ok' if row['ok'] else '**failed**'}: {what}{end}"


def place(page: str, table: str) -> str:
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the table between {BEGIN!r} and {END!r}")
    return f"{head}{BEGIN}\n\n{table}\n{END}{tail}"


def main() -> None:
    report, page = map(Path, sys.argv[1:3])
    page.write_text(place(page.read_text(), render(json.loads(report.read_text()))))


if __name__ == "__main__":
    main()
