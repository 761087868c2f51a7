"""What differs in an Apptainer sandbox from its image: read from the overlay's upper folder, on the host."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterator
from pathlib import Path

from polar.changes import Writer
from polar.errors import InfraError, NotFound
from runtimes import overlay_upper
from runtimes.bwrap import under as is_under
from runtimes.host_files import leads_nowhere
from runtimes.links import resolved
from runtimes.local_changes import put
from runtimes.overlay_upper import Differing, Found, opened, reading
from runtimes.tree import walk

# What Apptainer mounts over, not the agent's.
_NEVER = (
    "/proc", "/sys", "/dev", "/.singularity.d", "/etc/hosts", "/etc/resolv.conf", "/etc/passwd", "/etc/group", "/etc/localtime",
)  # fmt: skip


def added(upper: Path, lower: Path, under: str) -> Iterator[str]:
    """Paths below `under` that are the sandbox's own, or its changed copies. Raises NotFound, InfraError."""
    under = _real(upper, lower.resolve(), under)
    with reading(under), opened(upper, under) as fd:
        yield from (f.path for f in _scan(fd, under) if not f.gone)


def write(upper: Path, lower: Path, under: str, before: set[str], target: Path, limit: int) -> bool:
    """Raises NotFound without such a folder, in the sandbox as it is now; InfraError."""
    lower = lower.resolve()  # on the shelf it may be a link
    under = _real(upper, lower, under)
    with reading(under), opened(upper, under) as fd:
        hidden = overlay_upper.hidden(upper, under)
        if fd is None and (hidden or not os.path.isdir(lower / under[1:])):
            raise NotFound(f"no '{under}' in the sandbox")
        found = _differing(fd, lower, under, hidden)
        with Writer(target, limit) as out:
            out.removed(found.removed(before))
            paths = ((e, "/".join(e.path)) for e in (walk(fd, ".") if fd is not None else ()))
            put(out, ((e, path if path in found.own else "") for e, path in paths))
            return out.truncated or found.cut


def _differing(fd: int | None, lower: Path, under: str, hidden: bool) -> Differing:
    out = Differing()
    hides = [""] if hidden else []
    for f in _scan(fd, under):
        if not out.add(f.path, gone=f.gone):
            return out
        if f.hides:
            hides.append(f.path)
    for path in hides:
        for name in overlay_upper.listing(lower, f"{under}/{path}"):
            if not out.add(posixpath.join(path, name), gone=True):
                return out
    return out


def _real(upper: Path, lower: Path, under: str) -> str:
    def readlink(path: str) -> str | None:
        for top in (upper, lower):
            at = top / path[1:]
            if at.is_symlink():
                return os.readlink(at)
            if overlay_upper.hidden(upper, path):
                break
        return None

    try:
        return resolved(under, readlink)
    except OSError as e:
        if leads_nowhere(e):
            raise NotFound(f"no '{under}' in the sandbox") from e
        raise InfraError(f"can't read '{under}': {e.strerror or e}", code="artifact_failed") from e


def _scan(fd: int | None, under: str) -> Iterator[Found]:
    for f in overlay_upper.scan(fd) if fd is not None else ():
        if not is_under(posixpath.join(under, f.path), _NEVER):
            yield f
