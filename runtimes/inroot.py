"""Paths of a sandbox that lives in a host folder, resolved so that no link leads out of that folder.

Every step is taken from an open directory and refuses to follow links by itself, so an agent that swaps a folder for a
link meanwhile gains nothing.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from runtimes.identity import acting_as

MAX_LINKS = 40
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Escape(OSError):
    """The path leads out of the sandbox."""


class Root:
    """`folder` is what the sandbox sees as `/`; with `as_host`, the sandbox sees the host's paths and may use those
    inside `folder`. `owner` (uid, gid) is whom new files belong to, if this process is root. With `mounted`, `folder` is
    a sandbox's live file system, and other ones mounted in it (its /proc, volumes) are not entered."""

    def __init__(
        self, folder: Path, *, as_host: bool = False, owner: tuple[int, int] | None = None, mounted: bool = False
    ):
        self.folder = folder
        self.as_host = as_host
        self.owner = owner
        self.mounted = mounted

    @property
    def device(self) -> int | None:
        return os.stat(self.folder).st_dev if self.mounted else None

    @contextmanager
    def locate(self, path: str, *, parents: bool = False) -> Iterator[tuple[int, str]]:
        """An open directory and a name in it that is not a link (it may not exist). `path` is absolute inside;
        `parents` makes missing folders. Raises OSError."""
        # The folder itself may be a link of the kernel's (/proc/PID/root).
        stack = [os.open(self.folder, _DIR & ~os.O_NOFOLLOW if self.mounted else _DIR)]
        try:
            name = self._walk(stack, path, parents)
            yield stack[-1], name
        finally:
            for fd in stack:
                os.close(fd)

    def _walk(self, stack: list[int], path: str, parents: bool) -> str:
        todo = self._parts(path)[::-1]
        links = 0
        while todo:
            part = todo.pop()
            if part == "..":
                if len(stack) > 1:
                    os.close(stack.pop())
                continue
            target = _link(stack[-1], part)
            if target is not None:
                links += 1
                if links > MAX_LINKS:
                    raise OSError(errno.ELOOP, "too many links", path)
                if target.startswith("/"):
                    while len(stack) > 1:
                        os.close(stack.pop())
                todo += self._parts(target)[::-1]
                continue
            if not todo:
                return part
            if parents:
                try:
                    with acting_as(self.owner):
                        os.mkdir(part, 0o755, dir_fd=stack[-1])
                except FileExistsError:
                    pass
            stack.append(os.open(part, _DIR, dir_fd=stack[-1]))
            if self.mounted and os.fstat(stack[-1]).st_dev != os.fstat(stack[0]).st_dev:
                raise Escape(errno.EXDEV, "another file system is mounted there", path)
        return "."

    def _parts(self, path: str) -> list[str]:
        """Components of an inside path. An absolute one starts at the root."""
        if self.as_host and path.startswith("/"):
            base = str(self.folder)
            if path != base and not path.startswith(base + "/"):
                raise Escape(errno.EXDEV, "the path is outside the sandbox", path)
            path = path[len(base) :]
        return [p for p in path.split("/") if p not in ("", ".")]

    def write(self, path: str, source: BinaryIO, mode: int) -> None:
        """Make or replace a file, in one step."""
        with self.locate(path, parents=True) as (fd, name):
            put_file(fd, name, source, mode, self.owner)

    def put_tree(self, source: Path, path: str, mode: int | None) -> None:
        """Copy a host folder to `path`, into what is there. Links are copied as links; `mode` is for the files."""
        with self.locate(path, parents=True) as (fd, name):
            _put_folder(source, fd, name, mode, self.owner)


def put_file(fd: int, name: str, source: BinaryIO, mode: int, owner: tuple[int, int] | None = None) -> None:
    if name == ".":
        raise IsADirectoryError(errno.EISDIR, "is a folder", name)
    temp = f".polar-{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with acting_as(owner):
        out = os.open(temp, flags, 0o600, dir_fd=fd)
        try:
            with open(out, "wb") as f:
                while chunk := source.read(1 << 20):
                    f.write(chunk)
                os.fchmod(f.fileno(), mode)
            os.rename(temp, name, src_dir_fd=fd, dst_dir_fd=fd)
        except BaseException:
            os.unlink(temp, dir_fd=fd)
            raise


def _put_folder(source: Path, fd: int, name: str, mode: int | None, owner: tuple[int, int] | None) -> None:
    if name != ".":
        own = stat.S_IMODE(source.stat().st_mode) & 0o777 | 0o700
        try:
            with acting_as(owner):
                os.mkdir(name, own, dir_fd=fd)
        except FileExistsError:
            pass
    here = os.open(name, _DIR, dir_fd=fd)
    try:
        for entry in os.scandir(source):
            if entry.is_symlink():
                link = os.readlink(entry.path)
                with acting_as(owner):
                    try:
                        os.unlink(entry.name, dir_fd=here)
                    except FileNotFoundError:
                        pass
                    os.symlink(link, entry.name, dir_fd=here)
            elif entry.is_dir():
                _put_folder(Path(entry.path), here, entry.name, mode, owner)
            elif entry.is_file():
                with open(entry.path, "rb") as f:
                    put_file(here, entry.name, f, entry.stat().st_mode & 0o777 if mode is None else mode, owner)
    finally:
        os.close(here)


def _link(fd: int, name: str) -> str | None:
    try:
        return os.readlink(name, dir_fd=fd)
    except OSError as e:
        if e.errno in (errno.EINVAL, errno.ENOENT):
            return None
        raise
