"""What differs in an Apptainer sandbox from its image: read from the overlay's upper folder, on the host.

The kernel notes a removed path as a character device 0:0, and a folder that hides the image's by `user.overlay.opaque`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.changes import Writer
from polar.errors import InfraError, NotFound
from runtimes.local_changes import info
from runtimes.tree import walk

_OPAQUE = ("user.overlay.opaque", "trusted.overlay.opaque")
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# What Apptainer mounts over, not the agent's.
_NEVER = (
    "/proc", "/sys", "/dev", "/.singularity.d", "/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group", "/etc/localtime",
)  # fmt: skip


def added(upper: Path, under: str) -> Iterator[str]:
    """Paths below `under` that are the sandbox's own, or its changed copies."""
    with _open(upper, under) as fd:
        if fd is not None:
            yield from (path for path, kind, _ in _scan(fd, under) if kind == "own")


def write(upper: Path, lower: Path, under: str, before: set[str], target: Path, limit: int) -> bool:
    """Raises NotFound without such a folder, in the sandbox as it is now."""
    with _open(upper, under) as fd:
        original = lower / under.strip("/")
        if fd is None:
            if _hidden(upper, under) or not original.is_dir() or not _below(original, lower):
                raise NotFound(f"no '{under}' in the sandbox")
            with Writer(target, limit) as out:
                out.removed(before)
            return False
        own: set[str] = set()
        gone: set[str] = set()
        opaque = _is_opaque(fd) or _hidden(upper, under)
        replaced = [""] if opaque else []
        for path, kind, hides in _scan(fd, under):
            if kind == "own":
                own.add(path)
            else:
                gone.add(path)
            if hides:
                replaced.append(path)
        for path in replaced:
            gone |= {p for p in _listing(original, path) if p not in own}
        with Writer(target, limit) as out:
            out.removed(gone | (before - own))
            for entry in walk(fd, "."):
                path = "/".join(entry.path)
                if entry.kind == "cut":
                    out.truncated = True
                elif path in own and not out.truncated:
                    out.add(path, info(entry), entry.source)
                if entry.source is not None:
                    entry.source.close()
            return out.truncated


@contextmanager
def _open(upper: Path, under: str) -> Iterator[int | None]:
    """The folder in the upper layer; None if nothing of it was touched."""
    fd = os.open(upper, _DIR) if upper.is_dir() else None
    try:
        for part in (p for p in under.split("/") if p not in ("", ".")):
            if fd is None or part == "..":
                break
            try:
                inner = os.open(part, _DIR, dir_fd=fd)
            except OSError:
                inner = None
            os.close(fd)
            fd = inner
        yield fd
    except OSError as e:
        raise InfraError(f"can't read '{under}': {e.strerror or e}", code="artifact_failed") from e
    finally:
        if fd is not None:
            os.close(fd)


def _hidden(upper: Path, under: str) -> bool:
    """Does something in the upper layer stand between `under` and the image?"""
    at = upper
    for part in (p for p in under.split("/") if p not in ("", ".")):
        at = at / part
        try:
            mode = os.lstat(at).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISDIR(mode):
            return True
        fd = os.open(at, _DIR)
        try:
            if _is_opaque(fd):
                return True
        finally:
            os.close(fd)
    return False


def _scan(top: int, under: str) -> Iterator[tuple[str, str, bool]]:
    """(path, "own" or "gone", does it hide what the image has below it?), parents first."""
    todo = [("", os.dup(top))]
    try:
        while todo:
            path, fd = todo.pop()
            try:
                for name in os.listdir(fd):
                    rel = f"{path}/{name}" if path else name
                    absolute = f"{under.rstrip('/')}/{rel}"
                    if any(absolute == n or absolute.startswith(n + "/") for n in _NEVER):
                        continue
                    st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                    if stat.S_ISCHR(st.st_mode):
                        yield rel, "gone", False
                    elif stat.S_ISDIR(st.st_mode):
                        inner = os.open(name, _DIR, dir_fd=fd)
                        yield rel, "own", _is_opaque(inner)
                        if len(todo) > 500:  # descriptors; an honest tree isn't that wide and deep at once
                            os.close(inner)
                            raise InfraError(f"'{under}' is too wide and deep", code="artifact_failed", retryable=False)
                        todo.append((rel, inner))
                    else:
                        yield rel, "own", True
            finally:
                os.close(fd)
    finally:
        for _, fd in todo:
            os.close(fd)


def _is_opaque(fd: int) -> bool:
    for name in _OPAQUE:
        try:
            if os.getxattr(fd, name) in (b"y", b"x"):
                return True
        except OSError:
            continue
    return False


def _listing(original: Path, path: str) -> Iterator[str]:
    """Paths that the image has below `path`, relative to `original`; none if it is no folder there."""
    top = original / path
    if top.is_symlink() or not top.is_dir():
        return
    for at, folders, files in os.walk(top):
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(at, name), original)


def _below(path: Path, root: Path) -> bool:
    return os.path.realpath(path).startswith(os.path.realpath(root).rstrip("/") + "/")
