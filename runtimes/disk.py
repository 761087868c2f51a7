"""A bound on what a sandbox writes where no quota can be set: looked at while a command runs and when it has ended, so
best effort."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from polar.sandbox import ExecResult
from runtimes import closed

FIRST = 0.5  # seconds between the first looks; a tree that takes long to measure is measured less often
SHARE = 0.05  # of the time may go into measuring
MAX_FOLDERS = 500_000  # not yet looked into: more take too much memory, and nobody needs them


def usage(folder: Path, stop_at: int | None = None) -> int:
    """Bytes on disk below `folder`; stops counting above `stop_at`. What vanishes meanwhile counts nothing, nor what isn't
    this user's and closed to it."""
    total, todo = 0, ["."]
    while todo:
        inner = todo.pop()
        try:
            with closed.opened(folder, inner) as fd, os.scandir(fd) as entries:
                for entry in entries:
                    with contextlib.suppress(OSError):
                        info = entry.stat(follow_symlinks=False)
                        if stat.S_ISDIR(info.st_mode):
                            todo.append(f"{inner}/{entry.name}")
                            total += info.st_blocks * 512
                        else:
                            total += info.st_blocks * 512 // max(1, info.st_nlink)  # all its names are found
        except OSError as e:
            # Below the longest path nothing can be counted, and only who hides it puts it there.
            if e.errno == errno.ENAMETOOLONG and stop_at is not None:
                return stop_at + 1
            continue
        if stop_at is not None and (total > stop_at or len(todo) > MAX_FOLDERS):
            return max(total, stop_at + 1)
    return total


class DiskWatch:
    """`cancelled` for a command's watch: true when the caller wishes, or (then `exceeded`) above `limit` bytes. In a folder
    that holds more already, a command may write nothing more: as with a quota, it may read and remove."""

    def __init__(self, folder: Path, limit: int | None, cancelled: Callable[[], bool] | None):
        self.exceeded = False
        self._folder, self._limit, self._cancelled = folder, limit, cancelled
        self._allowed = 0 if limit is None else max(limit, usage(folder))
        self._next = time.monotonic() + FIRST

    def __call__(self) -> bool:
        if self._limit is not None and (begun := time.monotonic()) >= self._next:
            self._look()
            took = time.monotonic() - begun
            self._next = time.monotonic() + max(FIRST, took / SHARE)
            if self.exceeded:
                return True
        return bool(self._cancelled and self._cancelled())

    def _look(self) -> None:
        self.exceeded = self.exceeded or usage(self._folder, self._allowed) > self._allowed

    def told(self, result: ExecResult) -> ExecResult:
        """As the kernel tells of memory: killed from outside. Looks once more, for what was quicker than the looks."""
        if self._limit is None:
            return result
        self._look()
        if not self.exceeded:
            return result
        text = f"\nkilled: more than {self._limit >> 20} MB written (runtime.disk_mb)\n".encode()
        return msgspec.structs.replace(result, exit_code=137, cancelled=False, output=result.output + text)

    @property
    def needed(self) -> bool:
        return self._limit is not None or self._cancelled is not None
