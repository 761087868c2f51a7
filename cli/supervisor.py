"""A small process supervisor: starts, watches, restarts with backoff, and stops the processes of an embedded stack.

Every child runs in a process group of its own and is told to end (SIGTERM) by the kernel when its supervisor dies, so
that a killed stack leaves nothing running. A child that keeps ending is reported (`failed`), and still started again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cli.common import UNAVAILABLE
from polar.errors import PolarError

_PR_SET_PDEATHSIG = 1
STOP_SECONDS = 10.0
MAX_BACKOFF = 10.0
LOOK_SECONDS = 0.2
QUICK_SECONDS = 20.0  # a child that has lived so long has started well
FAULTS_TO_START = 3  # quick ends in a row after which a first start is given up
FAULTS = 5  # and after which a child counts as failed
# Our processes end with it while a service that they need is away. Then it is right to try again for as long as it takes.
AWAY = UNAVAILABLE


class StackError(PolarError):
    code = "stack_failed"


@dataclass
class Process:
    """One child. `ready` is polled until it is true; `restarts` False: it is left as it ended."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] = lambda: True
    ready_timeout: float = 60.0
    restarts: bool = True
    started: int = 0
    popen: subprocess.Popen | None = None
    started_at: float = 0.0
    due: float | None = 0.0  # when to start it; None while it runs
    quick: int = 0  # ends in a row that came soon after a start
    faults: int = 0  # those of them that were its own doing, and starts that weren't possible
    last: str = ""  # how it ended

    @property
    def steady(self) -> bool:
        """It runs, and if it ended early before, it has lived long enough since."""
        return self.popen is not None and self.popen.poll() is None and not self.quick


class Supervisor:
    def __init__(self, logs: Path, env: dict[str, str] | None = None):
        """`env` is what every child gets, by default what we have."""
        self.logs = logs
        self.env = dict(os.environ) if env is None else env
        self.processes: list[Process] = []
        self._stopping = threading.Event()
        self._wake = threading.Event()
        # Children die with the *thread* that started them, so one thread that lives as long as we do starts them all.
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, process: Process) -> None:
        """Start a process and wait until it is ready. Raises StackError with the end of its log."""
        self.processes.append(process)
        self._wake.set()
        deadline = None  # its time runs once it is there
        while not (process.popen and process.ready()):
            if process.faults >= FAULTS_TO_START:
                raise StackError(f"{process.name} {process.last}: {self.tail(process.name)}")
            if process.popen and deadline is None:
                deadline = time.monotonic() + process.ready_timeout
            if deadline is not None and time.monotonic() > deadline:
                raise StackError(
                    f"{process.name} was not ready in {process.ready_timeout:.0f} s: {self.tail(process.name)}"
                )
            time.sleep(0.01 if not process.popen else 0.05)

    @property
    def failed(self) -> str | None:
        """The process that keeps ending, and the end of its log; None while all is well."""
        for p in self.processes:
            if p.faults >= FAULTS:
                return f"{p.name} {p.last}, {p.faults} times in a row: {self.tail(p.name)}"
        return None

    def tail(self, name: str, size: int = 600) -> str:
        path = self.logs / f"{name}.log"
        text = path.read_text(errors="replace")[-size:] if path.exists() else ""
        return " | ".join(line for line in text.splitlines()[-6:] if line.strip()) or "its log is empty"

    def stop(self) -> None:
        """End all children, the last started first; kills what doesn't end in time."""
        self._stopping.set()
        self._wake.set()
        self._thread.join(timeout=5)
        children = [p for p in reversed(self.processes) if p.popen]
        # Those that hold work end first, what they depend on last.
        for group in _waves(children):
            for p in group:
                _signal(p, signal.SIGTERM)
            deadline = time.monotonic() + STOP_SECONDS
            for p in group:
                assert p.popen
                try:
                    p.popen.wait(max(0.0, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pass
                _signal(p, signal.SIGKILL)
                p.popen.wait()

    def _watch(self) -> None:
        while not self._stopping.is_set():
            for p in list(self.processes):
                self._look_after(p)
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()

    def _look_after(self, p: Process) -> None:
        now = time.monotonic()
        if p.due is None and p.popen and p.popen.poll() is None:
            if now - p.started_at >= QUICK_SECONDS:
                p.quick = p.faults = 0
        elif p.popen and not p.restarts:
            pass
        elif p.due is None and p.popen:
            early = now - p.started_at < QUICK_SECONDS
            code = p.popen.returncode
            _ended(p, f"ended with {code}", quick=early, fault=early and code != AWAY)
        elif p.due is not None and now >= p.due:
            try:
                self._spawn(p)
            except Exception as e:  # no memory, no descriptor: were this thread to end, all children would
                _ended(p, f"can't be started: {e}", quick=True, fault=True)

    def _spawn(self, p: Process) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{p.name}.log").open("ab") as out:
            p.popen = subprocess.Popen(
                p.argv,
                env={**self.env, **p.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        p.started_at, p.due = time.monotonic(), None
        p.started += 1


def _ended(p: Process, how: str, *, quick: bool, fault: bool) -> None:
    """Note it and say when to start it again."""
    p.last = how
    p.quick += quick
    p.faults += fault
    p.due = time.monotonic() + min(MAX_BACKOFF, 0.2 * 2 ** min(p.quick, 6))


def _waves(children: list[Process]) -> list[list[Process]]:
    """Workers together, then each service alone in reverse order of start."""
    workers = [p for p in children if p.name.startswith("worker")]
    rest = [[p] for p in children if not p.name.startswith("worker")]
    return ([workers] if workers else []) + rest


def _signal(p: Process, number: int) -> None:
    try:
        os.killpg(p.popen.pid, number)  # type: ignore[union-attr]
    except ProcessLookupError:
        pass


def _die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
