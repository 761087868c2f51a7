"""Private folders for what a stage holds on this host: artifacts, logs, uploads. What a killed process left goes when the
next one starts."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

log = logging.getLogger("polar.scratch")


class Scratch:
    """One process's share of `root`: a folder beside a file that is locked while the process lives. Never removes another
    living process's: the locked file is there before the folder, and goes after it."""

    def __init__(self, root: Path):
        self._root = root
        self._mutex = threading.Lock()
        self._own: Path | None = None
        try:
            _clear(root)
        except OSError as e:
            log.warning("%s: what killed processes left stays: %s", root, e)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A fresh one, removed at the end. Raises OSError."""
        path = Path(tempfile.mkdtemp(dir=self._mine()))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)

    def _mine(self) -> Path:
        with self._mutex:
            if self._own is None or not self._own.is_dir():
                self._root.mkdir(parents=True, exist_ok=True)
                path, lock = _locked(self._root)
                path.mkdir(mode=0o700)
                weakref.finalize(self, _end, path, lock)
                self._own = path
            return self._own


def _locked(root: Path) -> tuple[Path, IO[str]]:
    while True:
        path = root / secrets.token_hex(8)
        lock = open(_lock_of(path), "x")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _lock_of(path).exists():  # else one that cleared was faster
            return path, lock
        lock.close()


def _end(path: Path, lock: IO[str]) -> None:
    with lock:
        _remove(path)


def _clear(root: Path) -> None:
    if not root.is_dir():
        return
    for path in {p.with_suffix("") for p in root.iterdir()}:
        try:
            with open(_lock_of(path), "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(path)
        except FileNotFoundError:
            _remove(path)
        except BlockingIOError:  # its process lives
            continue


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if not os.path.lexists(path):
        with suppress(FileNotFoundError):
            _lock_of(path).unlink()


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")
