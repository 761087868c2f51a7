"""The reference pages, read: their tables and code blocks."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[2]


class Table(Struct):
    heading: str
    header: list[str]
    rows: list[list[str]]


@cache
def page(name: str) -> str:
    return (ROOT / f"docs/{name}.md").read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page(name), re.M | re.S)


@cache
def tables(name: str) -> list[Table]:
    found: list[Table] = []
    heading, before = "", ""
    for line in re.sub(r"^```.*?^```", "", page(name), flags=re.M | re.S).splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("|"):
            cells = [c.strip() for c in line.strip("|").split("|")]
            if not before.startswith("|"):
                found.append(Table(heading, cells, []))
            elif set(line) - set("|- "):
                assert len(cells) == len(found[-1].header), f"{name}: {line}"
                found[-1].rows.append(cells)
        before = line
    return found


def table(name: str, first: str) -> Table:
    """The one table whose first column is called `first`."""
    (found,) = (t for t in tables(name) if t.header[0] == first)
    return found


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_column(t: Table) -> list[str]:
    found = [n for row in t.rows for n in names(row[0])]
    assert len(found) == len(set(found)), f"{t.heading}: a name stands twice"
    return found
