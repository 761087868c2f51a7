"""What an overlay's upper folder says: the sandbox's own files, and what it hides of the layers below.

A removed path is a character device 0:0; a folder that replaced another has the attribute `user.overlay.opaque`. Inside,
neither can be made: the kernel refuses both on an overlay.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from polar.changes import MAX_ENTRIES
from polar.errors import InfraError, NotFound
from runtimes.tree import MAX_DEPTH

DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPAQUE = "user.overlay.opaque"


class Found(NamedTuple):
    path: str  # relative to the folder that was scanned
    gone: bool  # removed; else there, the sandbox's own
    hides: bool  # what the layers below have under this path isn't seen


class Differing:
    """Paths relative to a folder: those that the sandbox has of its `own`, and those that it hides of the layers below
    (`gone`); no more than are kept. `cut`: there are more."""

    def __init__(self) -> None:
        self.own: set[str] = set()
        self.gone: set[str] = set()
        self.cut = False

    def add(self, path: str, gone: bool) -> bool:
        """False if there is no room for more."""
        if len(self.own) + len(self.gone) >= MAX_ENTRIES:
            self.cut = True
            return False
        (self.gone if gone else self.own).add(path)
        return True

    def removed(self, before: set[str]) -> set[str]:
        """Those that can be told, of the paths `before` among others. What wasn't looked for isn't gone."""
        return (self.gone if self.cut else self.gone | before) - self.own


@contextmanager
def reading(path: str) -> Iterator[None]:
    """What can't be read is the machinery's failure. Raises InfraError."""
    try:
        yield
    except OSError as e:
        raise InfraError(f"can't read '{path}': {e.strerror or e}", code="artifact_failed") from e


@contextmanager
def opened(top: Path, inner: str) -> Iterator[int | None]:
    """The folder `inner` of `top`, no link followed; None where there is no folder. Raises OSError, and NotFound for one
    that this user may not read."""
    fd: int | None = _enter(str(top), None)
    try:
        for part in _parts(inner):
            assert fd is not None
            try:
                below = _enter(part, fd)
            except OSError:
                below = None
            os.close(fd)
            fd = below
            if fd is None:
                break
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


def hidden(upper: Path, inner: str) -> bool:
    """Is what the layers below have at `inner` hidden, by something at it or above it? Raises as `opened`."""
    fd = _enter(str(upper), None)
    try:
        for part in _parts(inner):
            try:
                mode = os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode
            except FileNotFoundError:
                return False
            except PermissionError as e:
                raise _closed(part) from e
            if not stat.S_ISDIR(mode):
                return True
            below = _enter(part, fd)
            os.close(fd)
            fd = below
            if is_opaque(fd):
                return True
        return False
    finally:
        os.close(fd)


def _enter(name: str, fd: int | None) -> int:
    try:
        return os.open(name, DIR, dir_fd=fd)
    except PermissionError as e:
        raise _closed(name) from e


def _closed(name: str) -> NotFound:
    return NotFound(f"'{name}' in the sandbox may not be read by this user")


def scan(top: int, path: str = "", depth: int = 0) -> Iterator[Found]:
    """All below the open folder `top`, parents first; not deeper than anything that is copied. What vanishes meanwhile, or
    can't be opened, is left out. Raises OSError."""
    with os.scandir(top) as entries:  # not as a list: there may be any number
        for name in (e.name for e in entries):
            inner = f"{path}/{name}" if path else name
            try:
                info = os.stat(name, dir_fd=top, follow_symlinks=False)
            except FileNotFoundError:
                continue
            except PermissionError:  # the folder may be listed and not entered
                yield Found(inner, False, False)
                continue
            if stat.S_ISCHR(info.st_mode) and info.st_rdev == 0:
                yield Found(inner, True, False)
            elif not stat.S_ISDIR(info.st_mode):
                yield Found(inner, False, True)
            else:
                yield from _scan_folder(top, name, inner, depth)


def _scan_folder(top: int, name: str, inner: str, depth: int) -> Iterator[Found]:
    try:
        fd = os.open(name, DIR, dir_fd=top)
    except OSError:
        yield Found(inner, False, False)
        return
    try:
        yield Found(inner, False, is_opaque(fd))
        if depth < MAX_DEPTH:
            yield from scan(fd, inner, depth + 1)
    finally:
        os.close(fd)


def is_opaque(fd: int) -> bool:
    try:
        return os.getxattr(fd, _OPAQUE) == b"y"
    except OSError:
        return False


def listing(top: Path, inner: str, *, but: tuple[str, ...] = ()) -> Iterator[str]:
    """Paths below `inner` of the lower folder `top`, relative to `inner`, without those of other file systems and the
    absolute ones in `but`. Nothing of what this user may not read."""
    with suppress(NotFound), opened(top, inner) as fd:
        if fd is None:
            return
        device = os.fstat(fd).st_dev
        for at, folders, files, here in os.fwalk(".", dir_fd=fd):
            prefix = os.path.relpath(at, ".")
            prefix = "" if prefix == "." else prefix + "/"
            base = f"{top}/{inner}/{prefix}".replace("//", "/")
            folders[:] = [n for n in folders if base + n not in but and _device(n, here) == device]
            yield from (prefix + n for n in (*folders, *files) if base + n not in but)


def _device(name: str, fd: int) -> int:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False).st_dev
    except OSError:
        return -1


def _parts(path: str) -> list[str]:
    return [p for p in path.split("/") if p not in ("", ".")]
