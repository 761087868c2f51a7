"""What a back-end keeps of its sandboxes on this host: a private file for each, whole or not there at all, also after a
power cut."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from polar.codec import from_json, to_json
from polar.errors import InfraError, InvalidTask

log = logging.getLogger("polar.records")

_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # this process's trouble, not the record's

Kind = TypeVar("Kind", bound=Struct)


def save(path: Path, record: Struct) -> None:
    """Raises OSError."""
    temp = path.with_name(f".{path.stem}.new")
    with _locked(path.parent, fcntl.LOCK_SH):
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(to_json(record))
            f.flush()
            os.fsync(f.fileno())
        os.replace(temp, path)
        _sync(path.parent)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def load(path: Path, kind: type[Kind]) -> Kind | None:
    """None: there is none. Raises InfraError for one that can't be read."""
    try:
        return from_json(path.read_bytes(), kind, str(path))
    except FileNotFoundError:
        return None
    except (OSError, InvalidTask) as e:
        raise InfraError(f"the sandbox's record can't be read: {e}", code="exec_failed") from e


def every(folder: Path, kind: type[Kind]) -> list[Kind]:
    """All that are there and can be read. What writers left who died in the middle goes. Raises InfraError."""
    if not folder.is_dir():
        return []
    _sweep(folder)
    out = []
    for path in sorted(folder.glob("*.json")):
        try:
            record = load(path, kind)
        except InfraError as e:
            if isinstance(e.__cause__, OSError) and e.__cause__.errno in _PASSING:
                raise
            _tell(path, str(e))
            continue
        if record is not None:
            out.append(record)
    return out


@cache
def _tell(path: Path, why: str) -> None:
    """Once per process: it stays so. Nothing is known of such a sandbox but its handle, which also names its folder."""
    log.error("%s: %s: its sandbox isn't looked after; remove '%s*' by hand", path, why, path.stem)


def _sweep(folder: Path) -> None:
    """While nobody writes: else the next time."""
    if left := list(folder.glob(".*.new")):
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as locked:
            for path in left if locked else ():
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[bool]:
    """False where it can't be had, also for good: not every network's file system locks folders."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, how)
        except OSError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)
