"""Folders that their owner closed to itself, as an agent does to hide what it writes there from a worker that isn't root."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_DIR = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = 0o500  # read and search


@contextmanager
def opened(top: Path, inner: str) -> Iterator[int]:
    """The folder at the relative path `inner` of `top`, open for reading. One of this user's own that is closed, or lies
    below such a one, is opened for that time, and its mode set back; a mode that is changed in the same moment is lost.
    Raises OSError."""
    try:
        fd = os.open(top / inner, os.O_RDONLY | _DIR)
        try:
            os.stat(".", dir_fd=fd)
        except OSError:
            os.close(fd)
            raise
    except PermissionError:
        at = _reached(top, inner)
        with _lifted(at):
            fd = os.open(".", os.O_RDONLY | _DIR, dir_fd=at)
            try:
                yield fd
            finally:
                os.close(fd)
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _reached(top: Path, inner: str) -> int:
    """A descriptor of the folder, only to find it by. Each step is taken from the one before and follows no link: the mode
    of nothing else may be changed."""
    at = os.open(top, os.O_PATH | _DIR)
    for part in inner.split("/"):
        with _lifted(at):
            at = os.open(part, os.O_PATH | _DIR, dir_fd=at)
    return at


@contextmanager
def _lifted(at: int) -> Iterator[None]:
    """The folder `at` may be read meanwhile. Closes the descriptor."""
    place = f"/proc/self/fd/{at}"
    try:
        mode = stat.S_IMODE(os.fstat(at).st_mode)
        if mode & _LOOK == _LOOK:
            yield
            return
        os.chmod(place, mode | _LOOK)
        try:
            yield
        finally:
            os.chmod(place, mode)
    finally:
        os.close(at)
