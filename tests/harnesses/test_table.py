"""The page's table and its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harnesses.table import BEGIN, END, place, render

PAGE = Path(__file__).parents[2] / "docs" / "harnesses.md"
ROW = {
    "harness": "pi", "version": "1.0", "dialect": "openai_chat", "scenario": "multi_turn", "ok": True, "termination": "finished",
    "turns": 7, "chains": 1, "continuity": 1.0, "breaks": {}, "foreign_hosts": [], "sampled_tokens": 10, "accounted_tokens": 10,
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


def test_it_is_put_into_its_place():
    page = PAGE.read_text()
    new = place(page, "the table")
    assert new.partition(BEGIN)[0] == page.partition(BEGIN)[0] and new.partition(END)[2] == page.partition(END)[2]
    assert place(new, "the table") == new
    with pytest.raises(ValueError, match="no place"):
        place("nothing", "x")
