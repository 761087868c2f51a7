"""What a back-end keeps of its sandboxes on this host: a private file for each, whole or not there at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from polar.codec import from_json, to_json

Kind = TypeVar("Kind", bound=Struct)


def save(path: Path, record: Struct) -> None:
    """Raises OSError."""
    temp = path.with_name(f".{path.stem}.new")
    with _locked(path.parent, fcntl.LOCK_SH):
        with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.write(to_json(record))
        os.replace(temp, path)


def load(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return from_json(path.read_bytes(), kind, str(path))
    except FileNotFoundError:
        return None


def every(folder: Path, kind: type[Kind]) -> list[Kind]:
    """All that are there. What writers left who died in the middle goes."""
    if not folder.is_dir():
        return []
    _sweep(folder)
    return [r for path in sorted(folder.glob("*.json")) if (r := load(path, kind)) is not None]


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
