"""Touching files as another user, in the calling thread alone: for a worker that is root and a container that isn't."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator

_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def acting_as(owner: tuple[int, int] | None) -> Iterator[None]:
    """(uid, gid) for what this thread does to files; None, or the process's own user, changes nothing."""
    if owner is None or os.geteuid() != 0 or owner[0] == 0:
        yield
        return
    _libc.setfsgid(owner[1])
    _libc.setfsuid(owner[0])
    try:
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
