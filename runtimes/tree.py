"""Copying a tree that an agent made onto this host: bounded, and nothing in it can point or write outside of it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from polar.changes import members
from polar.errors import Conflict

MAX_ENTRIES = 100_000
MAX_DEPTH = 100
_CHUNK = 1 << 18
_PASSES = 20  # over a folder in which there is only what came back


class Entry(NamedTuple):
    """One thing in a tree. `path` is relative to the tree's top, which itself is ()."""

    path: tuple[str, ...]
    kind: Literal["folder", "file", "link", "same", "cut"]
    mode: int = 0o644
    source: BinaryIO | None = None  # of a file
    target: str = ""  # of a link
    same_as: tuple[str, ...] = ()  # of a hard link: the path of an earlier file


def write_tree(entries: Iterator[Entry], target: Path, limit: int) -> bool:
    """Write a file or a folder at `target`, at most `limit` bytes of content. True if something was cut, also if nothing is
    at `target` then. Raises OSError where this host has no room.

    Links are kept only if they stay inside; they are made last, so that nothing is ever written through one. Devices,
    pipes and sockets are left out. `kind` "cut" stands for something that could not be read.
    """
    _clear(target)
    left, cut = limit, False
    links: list[Entry] = []
    for n, e in enumerate(entries):
        if n >= MAX_ENTRIES or len(e.path) > MAX_DEPTH:
            return _finish(target, links, True)
        if e.kind == "cut":
            cut = True
            continue
        if any(p in ("", ".", "..") or "/" in p or "\0" in p for p in e.path):
            continue
        path = target.joinpath(*e.path)
        if e.kind == "link":
            links.append(e)
            continue
        try:
            if e.kind == "folder":
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(e.mode & 0o777 | 0o700)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            source = e.source if e.kind == "file" else open(target.joinpath(*e.same_as), "rb")  # noqa: SIM115
            assert source is not None
            with source, open(path, "xb") as out:
                left = _copy(source, out, left)
                os.fchmod(out.fileno(), e.mode & 0o777 | 0o600)
        except OSError as e:  # names that this host can't hold, two of one name, a file where a folder should be
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            cut = True
            continue
        if left < 0:
            return _finish(target, links, True)
    return _finish(target, links, cut)


def _clear(target: Path) -> None:
    if target.is_symlink() or target.is_file():
        target.unlink()
    elif target.is_dir() and any(target.iterdir()):
        raise Conflict(f"{target}: is a folder with something in it")
    elif target.is_dir():
        target.rmdir()
    target.parent.mkdir(parents=True, exist_ok=True)


def _copy(source: BinaryIO, out: BinaryIO, left: int) -> int:
    """The part of the budget that is left; -1 if the file was longer."""
    while True:
        chunk = source.read(min(_CHUNK, left + 1))
        if not chunk:
            return left
        out.write(chunk[:left])
        left -= len(chunk)
        if left < 0:
            return -1


def _finish(target: Path, links: list[Entry], cut: bool) -> bool:
    for e in links:
        if e.path and stays_inside(e.path, e.target):
            path = target.joinpath(*e.path)
            # Below another link it would be somewhere else than its path says.
            if any(target.joinpath(*e.path[:n]).is_symlink() for n in range(1, len(e.path))):
                cut = True
                continue
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.symlink(e.target, path)
            except OSError:
                cut = True
    return cut or not os.path.lexists(target)


def stays_inside(path: tuple[str, ...], target: str) -> bool:
    """May the link at `path` exist? Only upward steps at the very start are allowed, as many as there are folders
    above it: then, whatever other such links it passes through, it ends inside."""
    if not target or target.startswith("/") or "\0" in target:
        return False
    parts = [p for p in target.split("/") if p not in ("", ".")]
    ups = next((i for i, p in enumerate(parts) if p != ".."), len(parts))
    return ups <= len(path) - 1 and ".." not in parts[ups:]


def walk(fd: int, name: str, path: tuple[str, ...] = (), *, device: int | None = None) -> Iterator[Entry]:
    """Entries of what lies at `name` in the open directory `fd`, following no link and, with `device`, entering no
    folder of another one. Raises FileNotFoundError."""
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except PermissionError:  # its folder may be listed and not entered
        yield Entry(path, "cut")
        return
    if stat.S_ISLNK(info.st_mode):
        yield Entry(path, "link", target=os.readlink(name, dir_fd=fd))
    elif stat.S_ISREG(info.st_mode):
        try:
            source = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            yield Entry(path, "cut")
            return
        with open(source, "rb") as f:
            # It may have become something else since it was looked at.
            if stat.S_ISREG(os.fstat(source).st_mode):
                yield Entry(path, "file", info.st_mode, f)
    elif stat.S_ISDIR(info.st_mode):
        if device is not None and info.st_dev != device:
            return
        if len(path) >= MAX_DEPTH:
            yield Entry(path, "cut")
            return
        try:
            here = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
        except OSError:
            yield Entry(path, "cut")
            return
        try:
            yield Entry(path, "folder", info.st_mode)
            with os.scandir(here) as found:
                for entry in found:
                    try:
                        yield from walk(here, entry.name, (*path, entry.name), device=device)
                    except FileNotFoundError:
                        continue
        finally:
            os.close(here)


def from_tar(tar: tarfile.TarFile) -> Iterator[Entry]:
    """Entries of a streamed archive whose members all begin with one common name, as a container engine sends it."""
    top: str | None = None
    for member in members(tar):
        parts = tuple(p for p in member.name.split("/") if p not in ("", "."))
        if ".." in parts:
            continue
        top = parts[0] if top is None and parts else top
        path = parts[1:]
        if parts and parts[0] != top:
            continue
        if member.isdir():
            yield Entry(path, "folder", member.mode)
        elif member.issym():
            yield Entry(path, "link", target=member.linkname)
        elif member.islnk():
            other = tuple(p for p in member.linkname.split("/") if p not in ("", "."))
            if other[:1] == (top,) and ".." not in other:
                yield Entry(path, "same", member.mode, same_as=other[1:])
        elif member.isreg():
            yield Entry(path, "file", member.mode, tar.extractfile(member))  # type: ignore[arg-type]


def unpack(archive: Path, target: Path, limit: int) -> bool:
    """Extract a tar archive (any compression) made by somebody else. True if something was cut."""

    def entries() -> Iterator[Entry]:
        yield Entry((), "folder", 0o755)
        with tarfile.open(archive, "r:*") as tar:
            for member in members(tar):
                parts = tuple(p for p in member.name.split("/") if p not in ("", "."))
                if member.name.startswith("/") or ".." in parts:
                    yield Entry((), "cut")
                elif member.isdir():
                    yield Entry(parts, "folder", member.mode)
                elif member.issym():
                    yield Entry(parts, "link", target=member.linkname)
                elif member.islnk():
                    other = tuple(p for p in member.linkname.split("/") if p not in ("", "."))
                    yield Entry((), "cut") if ".." in other else Entry(parts, "same", member.mode, same_as=other)
                elif member.isreg():
                    yield Entry(parts, "file", member.mode, tar.extractfile(member))  # type: ignore[arg-type]

    return write_tree(entries(), target, limit)


def remove(path: Path) -> None:
    """Remove a folder that an agent made, whatever modes, depth and number of files it has. Nothing is wrong if it is gone
    already, or another one removes it too. Raises OSError if something is left.

    Folders are lifted to the top before the one that held them goes: a chain of them may be deeper than any path or stack.
    No list of them is kept: there may be more than fit into memory."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    names = (str(path / f".polar-{secrets.token_hex(8)}-{n}") for n in itertools.count())

    def lift(folder: str) -> None:
        os.chmod(folder, 0o700)
        os.rename(folder, next(names))

    _empty(str(path), lambda folder: _empty(folder, lift))


def _empty(folder: str, found: Callable[[str], None]) -> None:
    """Give all folders in `folder` to `found`, which takes them away, and remove the rest and `folder` itself."""
    idle = 0
    while (folders := _pass(folder, found)) is not None:
        idle = 0 if folders else idle + 1
        if idle > _PASSES:
            raise OSError(errno.ENOTEMPTY, "something in it stays", folder)


def _pass(folder: str, found: Callable[[str], None]) -> int | None:
    """How many folders were found, as some may be left; None once `folder` is gone. Two at once take from each other what
    they are about to."""
    folders = 0
    try:
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_dir(follow_symlinks=False):
                        folders += 1
                        found(entry.path)
                    else:
                        os.unlink(entry.path)
        os.rmdir(folder)
    except FileNotFoundError:
        return None
    except OSError as e:
        if e.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return folders
    return None
