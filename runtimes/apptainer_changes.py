"""What differs in an Apptainer sandbox from its image: read from the overlay's upper folder, on the host."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from pathlib import Path

from polar.changes import Writer
from polar.errors import NotFound
from runtimes import overlay_upper
from runtimes.bwrap import under as is_under
from runtimes.links import resolved
from runtimes.local_changes import info
from runtimes.overlay_upper import Found, opened, reading
from runtimes.tree import walk

# What Apptainer mounts over, not the agent's.
_NEVER = (
    "/proc", "/sys", "/dev", "/.singularity.d", "/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group", "/etc/localtime",
)  # fmt: skip


def added(upper: Path, lower: Path, under: str) -> Iterator[str]:
    """Paths below `under` that are the sandbox's own, or its changed copies. Raises InfraError."""
    under = _real(upper, lower.resolve(), under)
    with reading(under), opened(upper, under) as fd:
        yield from (f.path for f in _scan(fd, under) if not f.gone)


def write(upper: Path, lower: Path, under: str, before: set[str], target: Path, limit: int) -> bool:
    """Raises NotFound without such a folder, in the sandbox as it is now; InfraError."""
    lower = lower.resolve()  # on the shelf it may be a link
    under = _real(upper, lower, under)
    with reading(under), opened(upper, under) as fd:
        hidden = overlay_upper.hidden(upper, under)
        if fd is None and (hidden or not (lower / under[1:]).is_dir()):
            raise NotFound(f"no '{under}' in the sandbox")
        own: set[str] = set()
        gone: set[str] = set()
        hides = [""] if hidden else []
        for f in _scan(fd, under):
            (gone if f.gone else own).add(f.path)
            if f.hides:
                hides.append(f.path)
        for path in hides:
            gone |= {posixpath.join(path, name) for name in overlay_upper.listing(lower, f"{under}/{path}")}
        with Writer(target, limit) as out:
            out.removed((gone | before) - own)
            for entry in walk(fd, ".") if fd is not None else ():
                path = "/".join(entry.path)
                if entry.kind == "cut":
                    out.truncated = True
                elif path in own and not out.truncated:
                    out.add(path, info(entry), entry.source)
                if entry.source is not None:
                    entry.source.close()
            return out.truncated


def _real(upper: Path, lower: Path, under: str) -> str:
    def readlink(path: str) -> str | None:
        for top in (upper, lower):
            at = top / path[1:]
            if at.is_symlink():
                return os.readlink(at)
            if overlay_upper.hidden(upper, path):
                break
        return None

    with reading(under):
        return resolved(under, readlink)


def _scan(fd: int | None, under: str) -> Iterator[Found]:
    for f in overlay_upper.scan(fd) if fd is not None else ():
        if not is_under(posixpath.join(under, f.path), _NEVER):
            yield f
