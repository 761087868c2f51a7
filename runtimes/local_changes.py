"""What differs in a local sandbox: it began with empty folders, so all that is in them, and what went since a baseline."""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from polar.changes import MAX_ENTRIES, Writer
from runtimes.host_files import reading
from runtimes.inroot import Root
from runtimes.tree import Entry, walk


def listing(root: Root, folder: str) -> Iterator[str]:
    for entry in _entries(root, folder):
        if entry.source is not None:
            entry.source.close()
        if entry.path:
            yield "/".join(entry.path)


def write(root: Root, folder: str, before: set[str], target: Path, limit: int) -> bool:
    now = set(islice(listing(root, folder), MAX_ENTRIES))
    with Writer(target, limit) as out:
        out.removed(before - now if len(now) < MAX_ENTRIES else ())
        put(out, ((e, "/".join(e.path)) for e in _entries(root, folder)))
        return out.truncated


def put(out: Writer, entries: Iterator[tuple[Entry, str]]) -> None:
    """Entries of a tree under their paths; an empty one is left out. Ends where something is missing."""
    for entry, path in entries:
        if entry.kind == "cut":
            out.truncated = True
        elif path:
            out.add(path, info(entry), entry.source)
        if entry.source is not None:
            entry.source.close()
        if out.truncated:
            return


def _entries(root: Root, folder: str) -> Iterator[Entry]:
    """Raises NotFound, InfraError."""
    with reading(root, folder), root.locate(folder) as (fd, name):
        need_folder(fd, name)
        yield from walk(fd, name)


def need_folder(fd: int, name: str) -> None:
    """Raises OSError unless it can be read as one."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder", name)
    os.close(os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd))


def info(entry: Entry) -> tarfile.TarInfo:
    out = tarfile.TarInfo()
    out.mode = entry.mode
    if entry.kind == "folder":
        out.type = tarfile.DIRTYPE
    elif entry.kind == "link":
        out.type, out.linkname = tarfile.SYMTYPE, entry.target
    elif entry.source is not None:
        found = os.fstat(entry.source.fileno())
        out.size, out.mtime = found.st_size, found.st_mtime
    return out
