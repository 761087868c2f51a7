"""A layer for workers that aren't root: the folders of this machine's software once more, owned by the worker's user.

A folder that only root may write to stays so in an overlay, and root isn't known in an ordinary user's namespaces. A merged
folder has the owner of its uppermost layer, so over empty folders of the user's own everything can be added, removed and
replaced. Single files of root's can be replaced only; those of /etc are copied, to be changed in place too.
One layer per state of the machine, shared by the sandboxes of a node.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from runtimes import bwrap, tree

MAX_COPY = 4 << 20  # bytes of one file
KEPT = 7 * 86400  # seconds after its last use: longer than sandboxes live


def find(data_dir: Path, paths: tuple[str, ...]) -> Path | None:
    """The layer of the folders `paths`, made if it is missing. None for root, who needs none. Raises OSError."""
    if os.geteuid() == 0:
        return None
    try:
        os.utime(layer := _made(data_dir, paths))
    except FileNotFoundError:
        _made.cache_clear()
        layer = _made(data_dir, paths)
    return layer


@cache
def _made(data_dir: Path, paths: tuple[str, ...]) -> Path:
    """Once per process, since all folders are read."""
    at = data_dir / "local-owned"
    at.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = list(_wanted(paths, data_dir))
    key = hashlib.sha256("\0".join(f"{p} {i.st_mode} {_version(i)}" for p, i in wanted).encode(errors="replace"))
    layer = at / key.hexdigest()[:20]
    with open(at / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not layer.is_dir():
            for half in at.glob("new-*"):
                tree.remove(half)
            new = Path(tempfile.mkdtemp(prefix="new-", dir=at))
            for path, info in wanted:
                with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                    _copy(path, info, new / path.strip("/"))
            new.rename(layer)
        os.utime(layer)
        for other in at.iterdir():
            if other.is_dir() and time.time() - other.stat().st_mtime > KEPT:
                tree.remove(other)
    return layer


def _version(info: os.stat_result) -> str:
    return "" if stat.S_ISDIR(info.st_mode) else f"{info.st_mtime_ns} {info.st_size}"


def _wanted(paths: tuple[str, ...], data_dir: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Folders of the machine, parents first, and those files of /etc and of the package manager that are to be copied."""
    hidden = (*bwrap.secrets(str(data_dir)), str(data_dir))
    for top in paths:
        device = os.stat(top).st_dev
        copied = bwrap.under(top, ("/etc", *bwrap.PACKAGES))
        yield top, os.stat(top)
        todo = [top]
        while todo:
            folder = todo.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda e: e.name)
            except OSError:
                continue  # not for us to see
            for e in entries:
                if e.is_symlink() or bwrap.under(e.path, hidden):
                    continue
                info = e.stat(follow_symlinks=False)
                if info.st_dev != device:
                    continue
                if e.is_dir(follow_symlinks=False):
                    yield e.path, info
                    todo.append(e.path)
                elif copied and stat.S_ISREG(info.st_mode) and _is_copied(e.path, info):
                    yield e.path, info


def _is_copied(path: str, info: os.stat_result) -> bool:
    """Of the package manager's files the locks alone: it replaces the others."""
    if bwrap.under(path, ("/etc",)):
        return info.st_size <= MAX_COPY and os.access(path, os.R_OK)
    return info.st_size == 0


def _copy(path: str, info: os.stat_result, target: Path) -> None:
    if stat.S_ISDIR(info.st_mode):
        target.mkdir(parents=True, exist_ok=True)
        target.chmod(info.st_mode & 0o777 | 0o700)
    elif info.st_size == 0:
        target.touch()
    else:
        shutil.copyfile(path, target)
        shutil.copystat(path, target)
