"""The page's table and its report."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness_adapters.versions import versions
from tests.harnesses.cases import DOCKER, LOCAL, Case
from tests.harnesses.clis import ALL, OTHERS, PI
from tests.harnesses.report import reported
from tests.harnesses.scenarios import SCENARIOS
from tests.harnesses.table import BEGIN, END, NO_DOCKER, lacking, lines_of, place, render

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "harnesses.md"
ROW = {
    "harness": "pi", "version": "1.0", "dialect": "openai_chat", "scenario": "multi_turn", "ok": True, "termination": "finished",
    "turns": 7, "chains": 1, "continuity": 1.0, "breaks": {}, "foreign_hosts": [], "sampled_tokens": 10, "accounted_tokens": 10,
    "runtime": "local",
}  # fmt: skip


def test_it_says_what_the_report_says():
    bad = {
        **ROW,
        "scenario": "compaction",
        "ok": False,
        "chains": 2,
        "continuity": 0.5,
        "breaks": {"edited": 2},
        "foreign_hosts": ["x.org"],
    }
    text = render(
        [
            ROW,
            bad,
            {**ROW, "harness": "codex", "foreign_hosts": None, "scenario": "timeout", "termination": "agent_timeout"},
        ]
    )
    assert (
        "| pi | 1.0 | openai_chat | ok: 7 turns, 1 chain, 100% | **failed**: 7 turns, 2 chains, 50% | – | x.org |"
        in text
    )
    assert "| codex | 1.0 | openai_chat | – | – | ok: 7 turns, 1 chain, 100%, agent_timeout | not watched |" in text
    assert (
        "- pi (openai_chat), compaction: 2 × edited" in text and "engine: 30; accounted for in the results: 30" in text
    )


def test_a_report_that_lacks_something_is_refused():
    with pytest.raises(ValueError, match="lacks turns"):
        render([{k: v for k, v in ROW.items() if k != "turns"}])
    with pytest.raises(ValueError, match="no column for another"):
        render([{**ROW, "scenario": "another"}])


def whole() -> list[dict]:
    """The report of a run of everything."""
    rows: list[dict] = []
    for case in [*LOCAL, *DOCKER]:
        with reported(case, rows.append) as row:
            row["termination"] = case.scenario.termination
    return rows


def test_runs_in_docker_are_counted_below_it_and_failed_ones_named():
    mounted = [c for c in DOCKER if c.runtime == "docker, mounted"]
    rows = whole()
    text = render(rows)
    assert f"In Docker sandboxes: mounted: {len(mounted)} of {len(mounted)} ok; image of one: 7 of 7 ok" in text
    (bad,) = [r for r in rows if (r["harness"], r["scenario"], r["runtime"]) == ("pi", "outage", "docker, mounted")]
    bad |= {"ok": False, "termination": "infra_error"}
    text = render(rows)
    assert f"mounted: {len(mounted) - 1} of {len(mounted)} ok" in text
    assert "- pi (docker, mounted), outage: **failed**" in text and text.count("**failed**") == 1


def test_all_runs_in_docker_or_none_and_then_it_says_so(tmp_path):
    rows = whole()
    assert any("docker, mounted" in words for words in lacking([r for r in rows if r["scenario"] != "outage"]))
    none = [r for r in rows if r["runtime"] == "local"]
    assert lacking(none) == [] and NO_DOCKER in render(none) and NO_DOCKER not in render(rows)
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    report.write_text(json.dumps(none))
    done = made(report, page)
    assert done.returncode == 0 and NO_DOCKER in done.stderr and NO_DOCKER in page.read_text()


def made(report: Path, page: Path) -> subprocess.CompletedProcess:
    argv = [sys.executable, "-m", "tests.harnesses.table", str(report), str(page)]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("end", [AssertionError("not done: PENDING"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_a_run_that_comes_to_no_result_has_a_failed_row(end):
    rows: list[dict] = []
    with pytest.raises(type(end)), reported(Case(PI, SCENARIOS[0]), rows.append):
        raise end
    assert rows[0]["failure"] == f"{type(end).__name__}: {end}"
    version = versions().harnesses["pi"].version
    assert f"| pi | {version} | {PI.dialect} | **failed**: no result | not watched |" in render(rows)


def test_a_run_that_fails_after_its_result_keeps_what_was_measured():
    rows: list[dict] = []
    with pytest.raises(AssertionError), reported(Case(PI, SCENARIOS[0]), rows.append) as row:
        row |= ROW
        raise AssertionError("a token is lost")
    assert "**failed**: 7 turns, 1 chain, 100%" in render(rows)


def test_the_committed_table_is_of_the_clis_and_versions_that_are_pinned():
    """A bump without `make harnesses` leaves it stale."""
    pinned = {name: h.version for name, h in versions().harnesses.items()}
    lines = lines_of(PAGE.read_text())
    assert {(cli, version) for cli, version, _ in lines} == set(pinned.items())
    assert sorted(lines) == sorted((c.harness, pinned[c.harness], c.dialect) for c in [*ALL, *OTHERS])


def test_only_the_report_of_a_whole_run_changes_the_page(tmp_path):
    report, page = tmp_path / "report.json", tmp_path / "page.md"
    page.write_text(PAGE.read_text())

    def table() -> subprocess.CompletedProcess:
        return made(report, page)

    rows = whole()
    assert lacking(rows) == []
    assert (none := table()).returncode == 1 and f"lacks {len(LOCAL)} runs" in none.stderr
    report.write_text(json.dumps([r for r in rows if r["harness"] == "pi"]))
    part = table()
    assert part.returncode == 1 and "the first of them claude_code" in part.stderr
    report.write_text(json.dumps([{**r, "version": "0"} if r["harness"] == "pi" else r for r in rows]))
    assert table().returncode == 1 and page.read_text() == PAGE.read_text()
    report.write_text(json.dumps(rows))
    assert table().returncode == 0 and render(rows) in page.read_text()


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
@pytest.mark.parametrize("args", ["", "-k pi"])
def test_a_part_of_it_touches_neither_page_nor_report(args):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}  # of a make that runs the tests
    argv = ["make", "-n", "harnesses", f"ARGS={args}"]
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert ("tests.harnesses.table" in done.stdout) == (not args)
    assert ("build/harnesses.json" in done.stdout) == (not args)


def test_it_is_put_into_its_place():
    page = PAGE.read_text()
    new = place(page, "the table")
    assert new.partition(BEGIN)[0] == page.partition(BEGIN)[0] and new.partition(END)[2] == page.partition(END)[2]
    assert place(new, "the table") == new
    with pytest.raises(ValueError, match="no place"):
        place("nothing", "x")
