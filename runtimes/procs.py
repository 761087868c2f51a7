"""Finding and killing processes through /proc, whatever they forked, renamed or detached themselves into."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")


class Proc(NamedTuple):
    pid: int
    ppid: int
    pgid: int
    sid: int
    start: int  # clock ticks after boot: with the pid it names one process for good
    state: str


def read(pid: int) -> Proc | None:
    """The living process `pid`; None if there is none, or only its corpse."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            # The name stands in brackets and may itself contain brackets and blanks.
            fields = f.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    state = fields[0].decode()
    if state in "ZX":
        return None
    return Proc(pid, int(fields[1]), int(fields[2]), int(fields[3]), int(fields[19]), state)


def scan() -> dict[int, Proc]:
    out = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (p := read(int(name))):
            out[p.pid] = p
    return out


def ticks_now() -> int:
    """The present in the unit of `Proc.start`, rounded down."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)


def environ_has(pid: int, entry: bytes) -> bool:
    """Does the environment that `pid` was started with hold `NAME=value`? False where it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return entry in f.read().split(b"\0")
    except OSError:
        return False


def argv_has(pid: int, word: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return word in f.read().split(b"\0")
    except OSError:
        return False


def environ_contains(pid: int, part: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            return part in f.read()
    except OSError:
        return False


def argv_contains(pid: int, part: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return part in f.read()
    except OSError:
        return False


def namespace(pid: int | str, kind: str) -> str:
    """Identity of a namespace such as `pid:[4026531836]`; empty where it may not be read."""
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return ""


def with_family(seeds: set[int], procs: dict[int, Proc]) -> set[int]:
    """`seeds`, their descendants, and whoever is in a session or group that one of these leads."""
    found = set(seeds)
    while True:
        more = {
            p.pid
            for p in procs.values()
            if p.pid not in found and (p.ppid in found or p.sid in found or p.pgid in found)
        }
        if not more:
            return found
        found |= more


def kill_all(select: Callable[[dict[int, Proc]], set[int]], timeout: float = 5.0) -> bool:
    """Kill what `select` picks from a scan, again and again until it picks nothing. False if some were left.

    Everything is stopped before anything is killed: a stopped process can't fork away. `select` may know of processes
    that began after the scan (a control group's): the next scan shows them.
    """
    deadline = time.monotonic() + timeout
    known: set[tuple[int, int]] = set()  # what was ours once stays ours when its parent is gone
    never = {os.getpid(), 1}
    pause = 0.001
    while True:
        procs = scan()
        ours = {p for p, start in known if p in procs and procs[p].start == start}
        found = (with_family(ours, procs) | select(procs)) - never
        if not found:
            return True
        fresh = {(pid, procs[pid].start) for pid in found if pid in procs} - known
        known |= fresh
        for pid, start in fresh:
            _signal(pid, start, signal.SIGSTOP)
        if not fresh:
            for pid in found & procs.keys():
                _signal(pid, procs[pid].start, signal.SIGKILL)
            time.sleep(pause)
            pause = min(0.05, pause * 2)
        if time.monotonic() > deadline:
            for pid in found & procs.keys():
                _signal(pid, procs[pid].start, signal.SIGKILL)
            return False


def _signal(pid: int, start: int, number: int) -> None:
    """Signal exactly the process that was seen: a reused pid is left alone."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        p = read(pid)
        if p and p.start == start:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(fd, number)
    finally:
        os.close(fd)
