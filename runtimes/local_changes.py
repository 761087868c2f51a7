"""What differs in a local sandbox: it began with empty folders, so all that is in them, and what went since a baseline."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from polar.changes import Writer
from polar.errors import InfraError
from runtimes.host_files import absent
from runtimes.inroot import Escape, Root
from runtimes.tree import Entry, walk


def listing(root: Root, folder: str) -> Iterator[str]:
    for entry in _entries(root, folder):
        if entry.source is not None:
            entry.source.close()
        if entry.path:
            yield "/".join(entry.path)


def write(root: Root, folder: str, before: set[str], target: Path, limit: int) -> bool:
    now = set(listing(root, folder))
    with Writer(target, limit) as out:
        out.removed(before - now)
        for entry in _entries(root, folder):
            if entry.kind == "cut":
                out.truncated = True
            elif entry.path and not out.truncated:
                out.add("/".join(entry.path), info(entry), entry.source)
            if entry.source is not None:
                entry.source.close()
        return out.truncated


def _entries(root: Root, folder: str) -> Iterator[Entry]:
    """Raises NotFound, InfraError."""
    try:
        with root.locate(folder) as (fd, name):
            yield from walk(fd, name)
    except (FileNotFoundError, NotADirectoryError, Escape) as e:
        raise absent(root, folder) from e
    except OSError as e:
        raise InfraError(f"can't read '{folder}': {e.strerror or e}", code="artifact_failed") from e


def info(entry: Entry) -> tarfile.TarInfo:
    out = tarfile.TarInfo()
    out.mode = entry.mode
    if entry.kind == "folder":
        out.type = tarfile.DIRTYPE
    elif entry.kind == "link":
        out.type, out.linkname = tarfile.SYMTYPE, entry.target
    elif entry.source is not None:
        stat = os.fstat(entry.source.fileno())
        out.size, out.mtime = stat.st_size, stat.st_mtime
    return out
