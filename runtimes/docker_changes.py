"""What differs in a container from its image, as the engine tells it."""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal, NamedTuple, cast

import msgspec
from docker.errors import APIError
from docker.errors import NotFound as EngineNotFound
from msgspec import Struct

from polar.changes import MAX_ENTRIES, Writer, members
from polar.errors import InfraError, NotFound
from runtimes.docker_engine import Engine
from runtimes.docker_reader import Reader

LIST_LIMIT = MAX_ENTRIES * 128  # bytes
TIMEOUT = 600.0  # seconds for the list of what differs
WRITE_TIMEOUT = 1800.0  # seconds for all the files of it
# More paths than this are picked out of one archive of the whole folder: each costs a request otherwise.
MAX_REQUESTS = 200
# Not the agent's, or not files: the engine's own mounts and what the kernel makes.
_NEVER = (
    *("/proc", "/sys", "/dev", "/.dockerenv", "/sbin/docker-init", "/usr/sbin/docker-init"),
    *("/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/run/polar"),
)


# How engines tell of a path that leads to nothing, Podman as the kernel, beside "not found".
_NOWHERE = ("not a directory", "file name too long", "too many levels of symbolic links")


def archive(api: Any, handle: str, path: str) -> Any:
    """The SDK's `get_archive`; EngineNotFound also for a path that the agent has made lead to nothing."""
    try:
        return api.get_archive(handle, path, chunk_size=1 << 18)
    except APIError as e:
        text = str(e.explanation or "").strip()
        if not (text.endswith(_NOWHERE) or text.startswith("evalSymlinksInScope: too many links")):
            raise
        raise EngineNotFound(text, e.response, e.explanation) from e


class Difference(NamedTuple):
    """Relative paths: what is new (with all below it), what was there and is another now, what is gone. `cut`: there are
    more."""

    added: list[str]
    changed: list[str]
    removed: list[str]
    cut: bool


class _Change(Struct, rename="pascal"):
    path: str
    kind: Literal[0, 1, 2]  # changed, added, removed


def difference(engine: Engine, handle: str, under: str) -> Difference:
    with engine.call(timeout=TIMEOUT, code="artifact_failed", lane="files") as api:
        found, cut = _told(api, handle)
    out = Difference([], [], [], cut)
    lists = {1: out.added, 0: out.changed, 2: out.removed}
    base = under.rstrip("/") + "/"
    for path, kind in sorted((e.path, e.kind) for e in found):
        if not path.startswith(base) or any(path == n or path.startswith(n + "/") for n in _NEVER):
            continue
        lists[kind].append(path[len(base) :])
    return out


def _told(api: Any, handle: str) -> tuple[list[_Change], bool]:
    """The SDK's `diff`, of which at most LIST_LIMIT bytes are read. True if there were more."""
    response = api._get(api._url("/containers/{0}/changes", handle), stream=True)
    chunks, data, cut = api._stream_raw_result(response, 1 << 18, False), bytearray(), False
    with contextlib.closing(chunks):
        for chunk in chunks:
            data += chunk
            if cut := len(data) > LIST_LIMIT:
                # No name has these bytes in it: a quotation mark within one stands behind a backslash.
                del data[max(0, data.rfind(b'},{"')) + 1 :]
                data += b"]"
                break
    try:
        return msgspec.json.decode(data, type=list[_Change] | None) or [], cut
    except msgspec.DecodeError as e:
        raise InfraError(f"can't read the engine's list of changes: {e}", code="artifact_failed") from e


def write(engine: Engine, handle: str, under: str, before: set[str], target: Path, limit: int) -> bool:
    now = difference(engine, handle, under)
    gone = set() if now.cut else before - set(now.added)
    tops = _tops(now.added)
    base = under.rstrip("/") + "/"
    deadline = time.monotonic() + WRITE_TIMEOUT
    with Writer(target, limit) as out:
        out.removed({*now.removed, *gone})
        if now.cut:
            return True
        # Podman follows links where a single path is asked for.
        if len(tops) + len(now.changed) > MAX_REQUESTS or engine.is_podman():
            _from_folder(engine, handle, under, set(now.added) | set(now.changed), out, deadline)
        else:
            for path in now.changed:
                _fetch(engine, handle, base, path, out, deadline, deep=False)
            for path in tops:
                if not out.truncated:
                    _fetch(engine, handle, base, path, out, deadline, deep=True)
        return out.truncated


def _tops(added: list[str]) -> list[str]:
    """The paths that have no parent among them. The argument is sorted, but `a-b` comes between `a` and `a/c`."""
    known = set(added)
    return [p for p in added if not any(parent in known for parent in _parents(p))]


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def _fetch(engine: Engine, handle: str, base: str, path: str, out: Writer, deadline: float, *, deep: bool) -> None:
    """One path, and with `deep` everything below it. Of a folder that was there before only its own entry is taken."""
    with contextlib.suppress(EngineNotFound), _archive(engine, handle, base + path, deadline) as tar:
        for member in members(tar):
            # Members begin with the last part of the path that was asked for.
            below = member.name.rstrip("/").partition("/")[2]
            linked = member.linkname.partition("/")[2] if member.islnk() else ""
            name = f"{path}/{below}" if below else path
            out.add(name, member, _content(tar, member), f"{path}/{linked}" if member.islnk() else "")
            if not deep or out.truncated:
                break


def _from_folder(engine: Engine, handle: str, under: str, wanted: set[str], out: Writer, deadline: float) -> None:
    with contextlib.suppress(EngineNotFound), _archive(engine, handle, under, deadline) as tar:
        for member in members(tar):
            path = _below(member.name, under)
            if path in wanted:
                linked = _below(member.linkname, under) if member.islnk() else ""
                out.add(path, member, _content(tar, member), linked)
            if out.truncated:  # what doesn't fit would be read to its end: it may be endless
                return


@contextlib.contextmanager
def _archive(engine: Engine, handle: str, path: str, deadline: float) -> Iterator[tarfile.TarFile]:
    left = deadline - time.monotonic()
    if left <= 0:
        raise InfraError("no time left to read what was changed", code="artifact_failed")
    with engine.call(timeout=left, code="artifact_failed", lane="files") as api:
        chunks, _ = archive(api, handle, path)
        try:
            with tarfile.open(fileobj=cast(BinaryIO, Reader(chunks)), mode="r|") as tar:
                yield tar
        except tarfile.TarError as e:
            raise InfraError(f"can't read '{path}': {e}", code="artifact_failed") from e
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
            chunks, _ = archive(api, handle, path)
            chunks.close()
    except EngineNotFound as e:
        raise NotFound(f"no '{path}' in the sandbox") from e
