"""What an agent made of a sandbox, as one archive: files added and changed, and the names of those that are gone.

The archive (tar) has a member `removed` (paths, each ended by NUL) and the rest below `files/`; paths are relative to one
folder of the sandbox, so it can be brought into another sandbox, of another back-end or on another node.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from polar.errors import InfraError
from polar.sandbox import Sandbox

_REMOVED, _FILES = "removed", "files/"
MAX_ENTRIES = 500_000
_BLOCK = 512  # what a member costs besides its content


def encode(paths: Iterable[str]) -> bytes:
    """Paths, each ended by NUL."""
    return b"".join(p.encode("utf-8", "surrogateescape") + b"\0" for p in sorted(paths))


def decode(data: bytes) -> list[str]:
    return [p.decode("utf-8", "surrogateescape") for p in data.split(b"\0") if p]


class Writer:
    """Writes an archive of at most `limit` bytes at `target`; `truncated` once something didn't fit. Devices, pipes and
    sockets are left out; set-id bits are dropped."""

    def __init__(self, target: Path, limit: int):
        self.truncated = False
        self._tar = tarfile.open(target, "w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
        self._left, self._entries = limit, 0
        self._names: set[str] = set()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def removed(self, paths: Iterable[str]) -> None:
        """To be called once, first."""
        data = encode(paths)
        member = tarfile.TarInfo(_REMOVED)
        member.size = len(data)
        self._take(member, io.BytesIO(data))

    def add(self, path: str, info: tarfile.TarInfo, source: BinaryIO | None = None, linked: str = "") -> None:
        """`path` is relative; `info` tells kind, mode, owner and time; `linked` the path of a hard link's other name."""
        parts = path.split("/")
        if any(p in ("", ".", "..") for p in parts) or not (info.isreg() or info.isdir() or info.issym() or linked):
            return
        member = tarfile.TarInfo(_FILES + path)
        member.type, member.mode = info.type, info.mode & (0o1777 if info.isdir() else 0o777)
        member.mtime, member.uid, member.gid = info.mtime, info.uid, info.gid
        if linked:
            if linked not in self._names:
                self.truncated = True
                return
            member.type, member.linkname = tarfile.LNKTYPE, _FILES + linked
        elif info.issym():
            member.linkname = info.linkname
        elif info.isreg():
            member.size = info.size
        if self._take(member, source) and info.isreg():
            self._names.add(path)

    def _take(self, member: tarfile.TarInfo, source: BinaryIO | None) -> bool:
        self._entries += 1
        cost = _BLOCK + member.size
        if cost > self._left or self._entries > MAX_ENTRIES:
            self.truncated = True
            return False
        self._left -= cost
        self._tar.addfile(member, source if member.isreg() else None)
        forget(self._tar)
        return True


def forget(tar: tarfile.TarFile) -> None:
    """What the library has kept of the archive's members: there may be any number."""
    tar.members.clear()  # type: ignore[attr-defined]


def members(tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    for member in tar:
        yield member
        forget(tar)


def removed(archive: Path) -> list[str]:
    """Paths that are gone, as the archive tells them; none if they didn't fit into it."""
    with tarfile.open(archive, "r:") as tar:
        first = tar.next()
        source = tar.extractfile(first) if first is not None and first.name == _REMOVED else None
        return decode(source.read() if source else b"")


def paths(archive: Path) -> list[str]:
    """Paths of everything added or changed, folders included."""
    with tarfile.open(archive, "r:") as tar:
        return [m.name[len(_FILES) :] for m in members(tar) if m.name.startswith(_FILES)]


# $1: the folder. Links where the archive has folders would lead its files elsewhere.
_CLEAR = 'cd -- "$1" && xargs -0 -r sh -c \'for p; do [ ! -L "$p" ] || rm -f -- "$p" || exit 1; done\' sh'
_REMOVE = 'cd -- "$1" && xargs -0 -r rm -rf --'
_EXTRACT = 'cd -- "$1" && tar -xpf "$2" && rm -f -- "$2"'


def apply(sandbox: Sandbox, archive: Path, under: str, *, timeout: float, exclude: tuple[str, ...] = ()) -> None:
    """Bring a sandbox in which nothing of the agent runs into the archive's state, below the folder `under`; `exclude`
    names relative paths to be left as they are. Its image needs sh, tar, rm and xargs.

    Raises InfraError (`apply_failed`).
    """

    left_out = frozenset(exclude)

    def wanted(path: str) -> bool:
        while path and path not in left_out:
            path = path.rpartition("/")[0]
        return not path

    def listed(names: Iterable[str]) -> bytes:
        return encode("./" + n for n in names if wanted(n))

    with tempfile.TemporaryDirectory() as folder:
        plain, folders = Path(folder) / "changes.tar", []
        with tarfile.open(archive, "r:") as tar, tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as out:
            for m in members(tar):
                if not m.name.startswith(_FILES) or not wanted(path := m.name[len(_FILES) :]):
                    continue
                m.name, m.pax_headers = "./" + path, {}
                if m.islnk():
                    if not wanted(m.linkname[len(_FILES) :]):
                        continue
                    m.linkname = "./" + m.linkname[len(_FILES) :]
                if m.isdir():
                    folders.append(path)
                    if under == "/" and "/" not in path:
                        continue  # a mount point, perhaps; a new one comes with what is in it
                out.addfile(m, tar.extractfile(m) if m.isreg() else None)
                forget(out)
        _run(sandbox, _REMOVE, [under], listed(removed(archive)), timeout)
        _run(sandbox, _CLEAR, [under], listed(folders), timeout)
        inside = f"{sandbox.ref.workdir.rstrip('/')}/.polar-changes.tar"
        sandbox.upload(plain, inside)
        _run(sandbox, _EXTRACT, [under, inside], b"", timeout)


def _run(sandbox: Sandbox, script: str, arguments: list[str], stdin: bytes, timeout: float) -> None:
    r = sandbox.exec(["sh", "-c", script, "changes", *arguments], stdin=stdin, timeout=timeout)
    if r.exit_code != 0:
        text = " ".join(r.output.decode("utf-8", "replace").split())[-300:]
        raise InfraError(
            f"the agent's files can't be brought into a fresh sandbox: {text or r.exit_code}", code="apply_failed"
        )
