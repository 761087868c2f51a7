"""The live view of a batch: one line per task while it runs, and the closing tables."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

from rich import box
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
    """One row per task; how sessions ended is told only where some didn't finish."""
    table = _table("Tasks", ("passed", "reward", "turns", "tokens", "traces", "run s"), first="task")
    unusual = any(r.termination != "finished" for r in results)
    if unusual:
        table.add_column("ended")
    by_task: dict[str, list[SessionResult]] = {}
    for r in results:
        by_task.setdefault(r.task_id, []).append(r)
    for name, group in by_task.items():
        rewards = [r.reward for r in group if r.reward is not None]
        ends = Counter(r.termination for r in group)
        row = [
            name,
            f"{sum(r.verdict == 'passed' for r in group)}/{len(group)}",
            f"{sum(rewards) / len(rewards):.2f}" if rewards else "none",
            str(sum(r.usage.turns for r in group)),
            str(sum(r.usage.sampled_tokens for r in group)),
            str(sum(r.trajectory.fidelity.traces for r in group)),
            f"{sum(r.timing.get('run', 0.0) for r in group) / len(group):.1f}",
        ]
        table.add_row(*row, *([", ".join(f"{k} {v}" for k, v in ends.items())] if unusual else []))
    return table


def stage_table(summary: Summary) -> Table:
    table = _table("Where the time went, mean seconds per session", tuple(s.replace("_", " ") for s in summary.stages))
    table.add_row(*(f"{v:.2f}" for v in summary.stages.values()))
    return table


def _table(title: str, numbers: tuple[str, ...], first: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    if first:
        table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
