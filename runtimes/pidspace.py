"""The processes of one container, seen from its host: which of them a single command started, and their end."""

from __future__ import annotations

import time

from runtimes import procs

EXEC_MARK = "POLAR_EXEC"  # in the environment of what a command starts


class PidSpace:
    """The process namespace of the container whose first process is `pid`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.name = procs.namespace(pid, "pid")

    def members(self, all: dict[int, procs.Proc]) -> set[int]:
        return {p for p in all if self.name and procs.namespace(p, "pid") == self.name}

    def present(self, *, with_main: bool) -> set[tuple[int, int]]:
        """(pid, start) of what runs already. `with_main`: the container's main process is a child of its first one, and
        in a container just started it may be a moment late, within one clock tick of the command that comes next."""
        deadline = time.monotonic() + 1.0
        while True:
            all = procs.scan()
            here = [p for p in all.values() if p.ppid == self.pid or procs.namespace(p.pid, "pid") == self.name]
            if not with_main or any(p.ppid == self.pid for p in here) or time.monotonic() > deadline:
                return {(p.pid, p.start) for p in here}
            time.sleep(0.005)

    def begun_by(self, all: dict[int, procs.Proc], mark: str, since: int, before: set[tuple[int, int]]) -> set[int]:
        """Everything that began here since `since` (ticks), and isn't another command's: what a command started, though it
        renamed itself, forked away or dropped its environment."""
        entry = f"{EXEC_MARK}={mark}".encode()
        return {
            p.pid
            for p in all.values()
            if p.start >= since
            and (p.pid, p.start) not in before
            and self.name
            and procs.namespace(p.pid, "pid") == self.name
            and not others(p.pid, entry)
        }


def others(pid: int, entry: bytes) -> bool:
    """Does the process belong to another command than `entry` marks? One without a mark doesn't."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as f:
            marks = [e for e in f.read().split(b"\0") if e.startswith(EXEC_MARK.encode() + b"=")]
    except OSError:
        return False
    return bool(marks) and entry not in marks
