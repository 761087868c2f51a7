"""A small process supervisor: starts, watches, restarts with backoff, and stops the processes of an embedded stack.

Every child runs in a process group of its own and is told to end (SIGTERM) by the kernel when its supervisor dies, so
that a killed stack leaves nothing running.
"""

from __future__ import annotations

import ctypes
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from polar.errors import PolarError

_PR_SET_PDEATHSIG = 1
STOP_SECONDS = 8.0
MAX_BACKOFF = 10.0


class StackError(PolarError):
    code = "stack_failed"


@dataclass
class Process:
    """One child. `ready` is polled until it is true; `restarts` False: its exit ends the stack."""

    name: str
    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] = lambda: True
    ready_timeout: float = 60.0
    restarts: bool = True
    started: int = 0
    popen: subprocess.Popen | None = None
    retry_at: float = 0.0


class Supervisor:
    def __init__(self, logs: Path):
        self.logs = logs
        self.processes: list[Process] = []
        self.failed: str | None = None
        self._stopping = threading.Event()
        # Children die with the *thread* that started them, so one thread that lives as long as we do starts them all.
        self._jobs: queue.Queue[tuple[Process, threading.Event]] = queue.Queue()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, process: Process) -> None:
        """Start a process and wait until it is ready. Raises StackError with the end of its log."""
        done = threading.Event()
        self.processes.append(process)
        self._jobs.put((process, done))
        done.wait()
        deadline = time.monotonic() + process.ready_timeout
        while not process.ready():
            assert process.popen
            if process.popen.poll() is not None and process.started > 2:
                raise StackError(f"{process.name} ended with {process.popen.returncode}: {self.tail(process.name)}")
            if time.monotonic() > deadline:
                raise StackError(
                    f"{process.name} was not ready in {process.ready_timeout:.0f} s: {self.tail(process.name)}"
                )
            time.sleep(0.05)

    def tail(self, name: str, size: int = 600) -> str:
        path = self.logs / f"{name}.log"
        text = path.read_text(errors="replace")[-size:] if path.exists() else ""
        return " | ".join(line for line in text.splitlines()[-6:] if line.strip()) or "its log is empty"

    def stop(self) -> None:
        """End all children, the last started first; kills what doesn't end in time."""
        self._stopping.set()
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

    def _spawn(self, p: Process) -> None:
        self.logs.mkdir(parents=True, exist_ok=True)
        with (self.logs / f"{p.name}.log").open("ab") as out:
            p.popen = subprocess.Popen(
                p.argv,
                env={**os.environ, **p.env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        p.started += 1

    def _watch(self) -> None:
        while not self._stopping.is_set():
            try:
                process, done = self._jobs.get(timeout=0.2)
                self._spawn(process)
                done.set()
                continue
            except queue.Empty:
                pass
            for p in self.processes:
                if p.popen is None or p.popen.poll() is None:
                    continue
                if not p.restarts:
                    self.failed = f"{p.name} ended with {p.popen.returncode}: {self.tail(p.name)}"
                elif p.retry_at == 0.0:
                    p.retry_at = time.monotonic() + min(MAX_BACKOFF, 0.2 * 2 ** min(p.started, 6))
                elif time.monotonic() >= p.retry_at:
                    p.retry_at = 0.0
                    self._spawn(p)


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
