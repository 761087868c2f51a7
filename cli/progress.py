"""The live view of a batch: one line per task while it runs, and the closing tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from cli.summary import Summary
from polar.errors import PolarError
from polar.result import SessionResult
from polar.session import STATES, Session
from polar.store.sessions import SessionStore

_SHORT = {"PENDING": "pend", "ADMITTED": "adm", "INITIALIZING": "init", "READY": "ready", "RUNNING": "run",
          "POSTRUN": "post", "DONE": "done"}  # fmt: skip


def watch(
    store: SessionStore, task_ids: Iterable[str], console: Console, *, live: bool, check: Callable[[], str | None]
) -> None:
    """Block until all tasks are done. `check` returns a reason to give up. Without `live`, a line per change."""
    ids = list(task_ids)
    started = time.monotonic()
    last = ""
    with Live(console=console, refresh_per_second=4, transient=True, auto_refresh=False) as display:
        while True:
            sessions = [s for t in ids for s in store.task_status(t).sessions]
            states = Counter(s.state for s in sessions)
            line = "  ".join(f"{_SHORT[st]} {states[st]}" for st in STATES if states[st])
            elapsed = time.monotonic() - started
            if live:
                display.update(_view(ids, sessions, line, elapsed), refresh=True)
            elif line != last:
                console.print(f"[{elapsed:6.1f} s] {line}")
                last = line
            if states["DONE"] == len(sessions):
                return
            if reason := check():
                raise PolarError(reason, code="stack_failed")
            time.sleep(0.25)


def _view(ids: list[str], sessions: list[Session], line: str, elapsed: float) -> Group:
    table = Table(box=None, pad_edge=False)
    for name in ("task", "sessions", "passed"):
        table.add_column(name)
    marks = {"passed": ("●", "green"), "failed": ("●", "red"), "partial": ("●", "yellow")}
    for t in ids[:40]:
        mine = [s for s in sessions if s.task_id == t]
        text = Text()
        for s in mine[:64]:
            mark, style = marks.get(s.verdict, ("●", "magenta")) if s.state == "DONE" else _MARKS[s.state]
            text.append(mark, style=style)
        table.add_row(t, text, str(sum(s.verdict == "passed" for s in mine)))
    return Group(table, Text(f"{elapsed:6.1f} s  {line}", style="dim"))


_MARKS = {"PENDING": ("·", "dim"), "ADMITTED": ("·", "cyan"), "INITIALIZING": ("◔", "cyan"), "READY": ("◑", "cyan"),
          "RUNNING": ("◕", "blue"), "POSTRUN": ("○", "blue")}  # fmt: skip


def task_table(results: list[SessionResult]) -> Table:
    table = Table(title="Tasks", title_justify="left")
    for name, right in (("task", False), ("passed", True), ("reward", True), ("turns", True), ("tokens", True),
                        ("traces", True), ("run s", True), ("ended", False)):  # fmt: skip
        table.add_column(name, justify="right" if right else "left", no_wrap=name == "task")
    by_task: dict[str, list[SessionResult]] = {}
    for r in results:
        by_task.setdefault(r.task_id, []).append(r)
    for name, group in by_task.items():
        rewards = [r.reward for r in group if r.reward is not None]
        ends = Counter(r.termination for r in group)
        table.add_row(
            name,
            f"{sum(r.verdict == 'passed' for r in group)}/{len(group)}",
            f"{sum(rewards) / len(rewards):.2f}" if rewards else "none",
            str(sum(r.usage.turns for r in group)),
            str(sum(r.usage.sampled_tokens for r in group)),
            str(sum(len(r.trajectory.traces) for r in group)),
            f"{sum(r.timing.get('run', 0.0) for r in group) / len(group):.1f}",
            ", ".join(f"{k} {v}" for k, v in ends.items()),
        )
    return table


def stage_table(summary: Summary) -> Table:
    table = Table(title="Where the time went (mean seconds per session)", title_justify="left")
    for name in summary.stages:
        table.add_column(name, justify="right")
    table.add_row(*(f"{v:.2f}" for v in summary.stages.values()))
    return table
