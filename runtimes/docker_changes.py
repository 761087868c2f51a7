"""What differs in a container from its image, as the engine tells it."""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, cast

from docker.errors import NotFound as EngineNotFound

from polar.changes import Writer
from polar.errors import InfraError, NotFound
from runtimes.docker_engine import Engine
from runtimes.docker_reader import Reader

TIMEOUT = 600.0
# More paths than this are picked out of one archive of the whole folder: each costs a request otherwise.
MAX_REQUESTS = 200
# Not the agent's, or not files: the engine's own mounts and what the kernel makes.
_NEVER = (
    *("/proc", "/sys", "/dev", "/.dockerenv", "/sbin/docker-init", "/usr/sbin/docker-init"),
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/polar"),
)


class Difference(NamedTuple):
    """Relative paths: what is new (with all below it), what was there and is another now, what is gone."""

    added: list[str]
    changed: list[str]
    removed: list[str]


def difference(engine: Engine, handle: str, under: str) -> Difference:
    with engine.call(timeout=TIMEOUT, code="artifact_failed") as api:
        found: list[dict[str, Any]] = api.diff(handle) or []
    out = Difference([], [], [])
    base = under.rstrip("/") + "/"
    for entry in sorted(found, key=lambda e: e["Path"]):
        path, kind = entry["Path"], entry["Kind"]
        if not path.startswith(base) or any(path == n or path.startswith(n + "/") for n in _NEVER):
            continue
        out[{1: 0, 0: 1, 2: 2}[kind]].append(path[len(base) :])
    return out


def write(engine: Engine, handle: str, under: str, before: set[str], target: Path, limit: int) -> bool:
    now = difference(engine, handle, under)
    gone = before - set(now.added)
    tops = _tops(now.added)
    base = under.rstrip("/") + "/"
    with Writer(target, limit) as out:
        out.removed({*now.removed, *gone})
        # Podman follows links where a single path is asked for.
        if len(tops) + len(now.changed) > MAX_REQUESTS or engine.is_podman():
            _from_folder(engine, handle, under, set(now.added) | set(now.changed), out)
        else:
            for path in now.changed:
                _fetch(engine, handle, base, path, out, deep=False)
            for path in tops:
                if not out.truncated:
                    _fetch(engine, handle, base, path, out, deep=True)
        return out.truncated


def _tops(added: list[str]) -> list[str]:
    """The paths that have no parent among them. The argument is sorted, but `a-b` comes between `a` and `a/c`."""
    known = set(added)
    return [p for p in added if not any(parent in known for parent in _parents(p))]


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def _fetch(engine: Engine, handle: str, base: str, path: str, out: Writer, *, deep: bool) -> None:
    """One path, and with `deep` everything below it. Of a folder that was there before only its own entry is taken."""
    with contextlib.suppress(EngineNotFound), engine.call(timeout=TIMEOUT, code="artifact_failed") as api:
        chunks, _ = api.get_archive(handle, base + path, chunk_size=1 << 18)
        try:
            with tarfile.open(fileobj=cast(BinaryIO, Reader(chunks)), mode="r|") as tar:
                for member in tar:
                    # Members begin with the last part of the path that was asked for.
                    below = member.name.rstrip("/").partition("/")[2]
                    linked = member.linkname.partition("/")[2] if member.islnk() else ""
                    name = f"{path}/{below}" if below else path
                    out.add(name, member, _content(tar, member), f"{path}/{linked}" if member.islnk() else "")
                    if not deep or out.truncated:
                        break
        except tarfile.TarError as e:
            raise InfraError(f"can't read '{base + path}': {e}", code="artifact_failed") from e
        finally:
            chunks.close()


def _from_folder(engine: Engine, handle: str, under: str, wanted: set[str], out: Writer) -> None:
    with contextlib.suppress(EngineNotFound), engine.call(timeout=TIMEOUT, code="artifact_failed") as api:
        chunks, _ = api.get_archive(handle, under, chunk_size=1 << 20)
        try:
            with tarfile.open(fileobj=cast(BinaryIO, Reader(chunks)), mode="r|") as tar:
                for member in tar:
                    path = _below(member.name, under)
                    if path in wanted:
                        linked = _below(member.linkname, under) if member.islnk() else ""
                        out.add(path, member, _content(tar, member), linked)
                    if out.truncated:  # what doesn't fit would be read to its end: it may be endless
                        return
        except tarfile.TarError as e:
            raise InfraError(f"can't read the container's files: {e}", code="artifact_failed") from e
        finally:
            chunks.close()


def _below(name: str, under: str) -> str:
    """Members begin with the last part of the path that was asked for; with nothing where that is the root."""
    name = posixpath.normpath(name).lstrip("/")
    return name if under == "/" else name.partition("/")[2]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> BinaryIO | None:
    source: IO[bytes] | None = tar.extractfile(member) if member.isreg() else None
    return cast("BinaryIO | None", source)


def exists(engine: Engine, handle: str, path: str) -> None:
    """Raises NotFound."""
    try:
        with engine.call(code="artifact_failed") as api:
            chunks, _ = api.get_archive(handle, path)
            chunks.close()
    except EngineNotFound as e:
        raise NotFound(f"no '{path}' in the sandbox") from e
