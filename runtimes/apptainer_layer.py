"""Where an Apptainer sandbox's writes go: an overlay's upper folder, on one of three kinds of storage.

- `folder`: a folder of the node, as large as its file system. A limit is only watched over.
- `file`: an ext4 file system of the limit's size in a sparse file. Needs a worker that may mount, so one that is root.
- `memory`: a tmpfs of the limit's size, in namespaces of its owner that one sleeping process keeps: it survives `stop` and
  the worker, not the node. Needs no rights. Its pages count as memory of whoever writes them.

The last two answer "no space left" at the limit, and the kernel's own overlay lies over all three: FUSE (fuse2fs under
fuse-overlayfs, Apptainer's own way with an image file) keeps every other user out, this process among them, and a killed
fuse2fs loses what it hadn't written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from polar.errors import InfraError
from runtimes import procs
from runtimes.apptainer_cli import PATH, Cli
from runtimes.identity import acting_as

Kind = Literal["folder", "file", "memory"]
INODE_RATIO = 8192  # bytes for which there is one file
JOURNAL_FROM = 32 << 20  # a smaller file system has no room for a journal
SPARE_NAMES, SPARE_BYTES = 16, 64 << 10
TIMEOUT = 60.0
_MARK = "POLAR_LAYER"
# The namespaces, and the tmpfs in them, live as long as that process, whose id is told.
_HOLD = 'mount -t tmpfs -o "$1" tmpfs "$2" || exit 1; sleep infinity <&- >&- 2>&- & echo $!'
# Its namespace would keep other sandboxes' file systems busy.
_FORGET = 'for d in "$0"/*/; do umount -l "$d" 2>/dev/null; done; exec "$@"'


class Layer(Protocol):
    """`path` is the overlay's folder as Apptainer is told it; `entering` the command prefix that leads to where it is."""

    path: Path
    bounded: bool

    @property
    def upper(self) -> Path:
        """The written files, as this process reads them. Raises InfraError if they are gone."""
        ...

    @property
    def entering(self) -> Sequence[str]: ...

    def make(self, cli: Cli) -> None: ...

    def open(self) -> None:
        """What is made is there for use, also after a restart of the node. Raises InfraError, OSError."""
        ...

    def remove(self) -> None:
        """Also of one that is just being made by a worker that died. Raises InfraError, OSError."""
        ...


@contextlib.contextmanager
def room(layer: Layer, cli: Cli) -> Iterator[None]:
    """Room for mounting an overlay over a layer that the agent has filled to its last byte and name: something that lies
    beside the overlay's folders goes meanwhile."""
    if not layer.bounded:
        yield
        return
    spare = layer.upper.parent / "spare"
    with acting_as(cli.owner):
        if spare.is_dir():
            shutil.rmtree(spare)
    yield
    with acting_as(cli.owner), contextlib.suppress(OSError):
        for n in range(SPARE_NAMES):
            (spare / str(n)).mkdir(parents=True)
        (spare / "bytes").write_bytes(b"x" * SPARE_BYTES)


def layer(kind: Kind, handle: str, folder: Path, disks: Path, size: int) -> Layer:
    if kind == "file":
        return File(disks / handle, disks / f"{handle}.img", size)
    return Memory(folder, handle, disks, size) if kind == "memory" else Folder(folder)


class Folder:
    bounded = False
    entering: tuple[str, ...] = ()

    def __init__(self, folder: Path):
        self.path = folder / "overlay"
        self.upper = self.path / "upper"

    def make(self, cli: Cli) -> None:
        _own_folder(self.path, cli)

    def open(self) -> None:
        pass

    def remove(self) -> None:
        pass  # it lies in the sandbox's folder


class File:
    """Neither the file nor the mount point is in a folder that the containers' owner may write to: what root mounts is
    root's, and where."""

    bounded = True
    entering: tuple[str, ...] = ()

    def __init__(self, path: Path, image: Path, size: int):
        self.path, self.upper, self._image, self._size = path, path / "upper", image, size

    def make(self, cli: Cli) -> None:
        with open(os.open(self._image, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), "wb") as f:
            f.truncate(self._size)
        owner = cli.owner or (os.getuid(), os.getgid())
        extended = f"root_owner={owner[0]}:{owner[1]},lazy_itable_init=1,lazy_journal_init=1,nodiscard"
        journal = ["-J", "size=4"] if self._size >= JOURNAL_FROM else ["-O", "^has_journal"]
        options = ["-q", "-F", "-m", "0", "-b", "4096", "-i", str(INODE_RATIO), *journal, "-E", extended]
        _run(["mkfs.ext4", *options, str(self._image)])
        self.path.mkdir(mode=0o700)
        self.open()
        self.path.chmod(0o700)

    def open(self) -> None:
        if not self.path.is_dir():
            raise InfraError("the sandbox's files are gone", code="exec_failed")
        if not os.path.ismount(self.path):
            # No tables are zeroed in the background: that would fill the sparse file.
            options = "loop,nosuid,nodev,noatime,noinit_itable"
            _run(["mount", "-t", "ext4", "-o", options, str(self._image), str(self.path)])

    def _is_at_work(self, pid: int) -> bool:
        """Does the process make or mount it?"""
        mine = procs.argv_has(pid, os.fsencode(self._image))
        return mine and (procs.argv_has(pid, b"mkfs.ext4") or procs.argv_has(pid, b"mount"))

    def remove(self) -> None:
        _kill(self._is_at_work)
        while os.path.ismount(self.path):
            _run(["umount", "--lazy", str(self.path)])
        if self.path.is_dir():
            self.path.rmdir()
        self._image.unlink(missing_ok=True)


class Memory:
    bounded = True

    def __init__(self, folder: Path, handle: str, disks: Path, size: int):
        self.path, self._pid = folder / "overlay", folder / "holder"
        self._handle, self._disks, self._size = handle, disks, size

    @property
    def upper(self) -> Path:
        return Path(f"/proc/{self._holder()}/root{self.path}/upper")

    @property
    def entering(self) -> list[str]:
        spaces = ["--user", "--mount", "--preserve-credentials"]
        return ["nsenter", *spaces, f"--target={self._holder()}", "--"]

    def _is_holder(self, pid: int) -> bool:
        return procs.environ_has(pid, f"{_MARK}={self._handle}".encode())

    def _holder(self) -> int:
        """Its start counts: an agent's process may get the number of one that ended, and give itself this mark."""
        try:
            pid, start = map(int, self._pid.read_text().split())
        except (OSError, ValueError):
            pid = start = 0
        found = procs.read(pid)
        if found is None or found.start != start or not self._is_holder(pid):
            raise InfraError("the sandbox's files are gone: nothing holds them in memory", code="exec_failed")
        return pid

    def make(self, cli: Cli) -> None:
        _own_folder(self.path, cli)
        options = f"size={self._size},nr_inodes={max(1024, self._size // INODE_RATIO)},mode=700,nosuid,nodev"
        spaces = ["unshare", "--user", "--map-current-user", "--mount", "--propagation=slave", "--keep-caps", "--"]
        argv = cli.as_owner([*spaces, "/bin/sh", "-c", _HOLD, "sh", options, str(self.path)])
        if cli.owner is not None:
            argv = ["unshare", "--mount", "--propagation=slave", "/bin/sh", "-c", _FORGET, str(self._disks), *argv]
        with open(self._pid, "x") as f:  # the folder is the owner's: nothing there is followed
            held = procs.read(int(_run(argv, env={"PATH": PATH, _MARK: self._handle})))
            if held is None:
                raise InfraError("the sandbox's memory file system is gone at once", code="exec_failed")
            f.write(f"{held.pid} {held.start}")

    def open(self) -> None:
        self._holder()

    def remove(self) -> None:
        _kill(self._is_holder)


def _own_folder(path: Path, cli: Cli) -> None:
    path.mkdir()
    cli.give(path)
    path.chmod(0o700)


def _kill(match: Callable[[int], bool]) -> None:
    if not procs.kill_all(lambda all: {pid for pid in all if match(pid)}, timeout=15):
        raise InfraError("processes that keep a sandbox's files can't be killed", code="exec_failed")


def _run(argv: list[str], env: dict[str, str] | None = None) -> str:
    """What it printed. Raises InfraError, OSError."""
    try:
        done = subprocess.run(
            argv,
            env=env or {"PATH": PATH, "LANG": "C.UTF-8"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired as e:
        raise InfraError(f"{argv[0]}: no end after {TIMEOUT:.0f} s", code="exec_failed") from e
    if done.returncode != 0:
        raise InfraError(f"{argv[0]}: {done.stderr.strip()[-300:] or done.returncode}", code="exec_failed")
    return done.stdout


@cache
def no_files() -> str:
    """Why this process can't mount file systems of its own; empty if it can. Once per process."""
    if os.geteuid() != 0:
        return "only a worker that is root may mount a file system"
    probe = "mount -t tmpfs none /tmp && cd /tmp && truncate -s 1M i && mkfs.ext4 -q i && mkdir m && mount -o loop i m"
    try:
        _run(["unshare", "--mount", "/bin/sh", "-c", probe])  # in a namespace of its own: nothing is left
    except (InfraError, OSError) as e:
        return f"no file system can be mounted: {e}"
    return ""
