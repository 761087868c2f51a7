"""The files of a local sandbox with a copy-on-write root: seen through its holder, and what differs in them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import posixpath
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from polar.changes import Writer
from polar.errors import InfraError, NotFound
from polar.ids import new_id
from polar.sandbox import SandboxRef
from runtimes import bwrap, holder, host_files, links, local_root, overlay_upper, procs, tree
from runtimes.inroot import Root
from runtimes.local_box import Record
from runtimes.local_changes import need_folder, put
from runtimes.overlay_upper import Differing, opened, reading
from runtimes.tree import walk

log = logging.getLogger("polar.local")
_OLD = 300.0  # seconds


class Support:
    """Whether sandboxes in `data_dir` can have a copy-on-write root: what this process has found out so far."""

    def __init__(self, data_dir: Path):
        self._data_dir = data_dir
        self._tried = False
        self.known_missing = ""  # why not

    def is_missing(self, why: str) -> None:
        if not self.known_missing:
            log.warning(
                "no copy-on-write root for sandboxes in '%s' (system folders are read-only): %s", self._data_dir, why
            )
        self.known_missing = why

    def missing(self) -> str:
        """Why not; empty if they can. Tries it, once."""
        if not (self.known_missing or self._tried):
            try:
                self._try()
            except holder.Impossible as e:
                self.known_missing = str(e)
            except (InfraError, OSError) as e:
                return str(e)
            self._tried = True
        return self.known_missing

    def _try(self) -> None:
        probes = self._data_dir / "local-probes"
        probes.mkdir(mode=0o700, parents=True, exist_ok=True)
        for old in probes.iterdir():  # of processes that were killed
            if time.time() - old.stat().st_mtime > _OLD:
                _kill(old)
                tree.remove(old)
        record = Record(ref=SandboxRef(backend="local", handle=new_id("probe"), proxy_url="", workdir="/work"))
        folder = probes / record.ref.handle
        (folder / "fs").mkdir(parents=True)
        one = Cow(record, folder, self._data_dir, lambda: None)
        try:
            one.make()
        finally:
            one.end(lambda _: _kill(folder))
            tree.remove(folder)


def _kill(folder: Path) -> None:
    procs.kill_all(lambda all: {p for p in all if holder.is_of(p, folder)})


@cache
def support(data_dir: Path) -> Support:
    return Support(data_dir)


class Cow:
    """`stop` ends everything of the sandbox's: what still used an earlier holder's mounts must not go on beside new ones."""

    def __init__(self, record: Record, folder: Path, data_dir: Path, stop: Callable[[], None]):
        self._record, self._folder, self._data_dir, self._stop = record, folder, data_dir, stop
        self._handle = record.ref.handle

    def make(self) -> None:
        """Raises Impossible, OSError, InfraError."""
        local_root.make(self._folder, self._data_dir)
        (self._folder / "lock").touch(0o600)
        with self._locked() as lock:
            self._start(lock)
        workdir = self._record.ref.workdir
        if bwrap.under(workdir, tuple(self._overlays())):
            with self.files("exec_failed") as root, root.locate(f"{workdir}/x", parents=True):
                pass

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """Raises InfraError where the sandbox is gone."""
        try:
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError as e:
            raise InfraError(f"sandbox '{self._handle}' is gone", code="exec_failed") from e
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if not (self._folder / "fs").is_dir():
                raise InfraError(f"sandbox '{self._handle}' is gone", code="exec_failed")
            yield fd
        finally:
            os.close(fd)  # not unlocked: a holder that is just being made keeps it

    def _start(self, lock: int) -> procs.Proc:
        return holder.start(self._folder, local_root.mounts(self._record, self._folder, self._data_dir), lock)

    def holder(self) -> procs.Proc:
        """The living one, made anew if it ended. Raises InfraError."""
        with self._locked() as lock:
            found = holder.find(self._folder)
            if found:
                return found
            self._stop()
            try:
                return self._start(lock)
            except (holder.Impossible, OSError) as e:
                raise InfraError(f"the sandbox's mounts can't be made again: {e}", code="exec_failed") from e

    def is_holder(self, pid: int) -> bool:
        """Also of one that is just being made."""
        return holder.is_of(pid, self._folder)

    def end(self, everything: Callable[[bool], None]) -> None:
        """End the holder, so that none is made again: the sandbox is being removed. `everything` ends its other processes;
        if called with True, also a holder that is just being made. Raises OSError."""
        try:
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # only half-made, or half removed
            everything(True)
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                everything(True)
                fcntl.flock(fd, fcntl.LOCK_EX)
            if found := holder.find(self._folder):
                holder.end(found)
            everything(False)  # one that is being made would keep the lock
            with contextlib.suppress(FileNotFoundError):
                (self._folder / "fs").rename(self._folder / "gone")
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def files(self, code: str) -> Iterator[Root]:
        """The sandbox's root as its commands see it. Errors are told under `code`."""
        try:
            with self._seen_by(self.holder()) as root:
                yield root
        except InfraError as e:
            raise e if e.code != "exec_failed" else InfraError(e.message, code=code, retryable=e.retryable) from e

    @contextlib.contextmanager
    def _seen_by(self, found: procs.Proc) -> Iterator[Root]:
        """The root in the mounts of this very process: another one with its number may be an agent's, whose links lead
        anywhere. And once it has ended, what was done may be in no mount of the sandbox's. Raises InfraError."""

        def check() -> None:
            now = procs.read(found.pid)
            if now is None or now.start != found.start:
                raise InfraError("the sandbox's mounts are gone", code="exec_failed")

        try:
            fd = os.open(f"/proc/{found.pid}/root{self._folder}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as e:
            raise InfraError(f"the sandbox's mounts are gone: {e}", code="exec_failed") from e
        try:
            check()
            yield Root(Path(f"/proc/self/fd/{fd}/fs"))
            check()
        except NotFound:
            check()
            raise
        finally:
            os.close(fd)

    # -- what differs

    def listing(self, under: str) -> set[str]:
        """Paths below `under` that are the sandbox's own. Raises NotFound, InfraError."""
        return self._differing(self._there(under)).own

    def write(self, target: Path, under: str, before: set[str], limit: int) -> bool:
        """Raises NotFound, InfraError."""
        under = self._there(under)
        found = self._differing(under)
        with Writer(target, limit) as out:
            out.removed(found.removed(before))
            for top, inner, prefix in self._parts(under):
                if out.truncated:
                    break
                with reading(under), opened(top, inner) as fd:
                    entries = walk(fd, ".") if fd is not None else iter(())
                    paths = ((e, posixpath.join(prefix, *e.path)) for e in entries)
                    put(out, ((e, path if path in found.own else "") for e, path in paths))
            return out.truncated or found.cut

    def _there(self, under: str) -> str:
        """`under` without links. Raises NotFound."""
        with self.files("artifact_failed") as root, host_files.reading(root, under):
            with root.locate(under) as (fd, name):
                need_folder(fd, name)
            return links.resolved(under, _readlink(root.folder))

    def _overlays(self) -> list[str]:
        return local_root.writable(self._data_dir)

    def _parts(self, under: str) -> Iterator[tuple[Path, str, str]]:
        """What `under` is made of: a folder of the host, the path in it, and the same relative to `under`."""
        for path in self._overlays():
            if bwrap.under(under, (path,)):
                yield self._folder / "upper" / path.strip("/"), under[len(path) :], ""
                return
        yield self._folder / "fs", under, ""
        for path in self._overlays():
            if under == "/" or bwrap.under(path, (under,)):
                yield self._folder / "upper" / path.strip("/"), "", posixpath.relpath(path, under)

    def _differing(self, under: str) -> Differing:
        with reading(under):
            mounts = local_root.bound(self._record, self._folder, self._data_dir)
            masked = local_root.masked(self._folder)
        ours = {f"/{name}": target for name, target in local_root.links().items()}
        not_its = (*local_root.OWN, *self._overlays(), "/var/run", "/var/lock", *mounts)
        out = Differing()
        for top, inner, prefix in self._parts(under):
            plain = top == self._folder / "fs"
            with reading(under), opened(top, inner) as fd:
                hides = [""] if not plain and overlay_upper.hidden(top, inner) else []
                for f in overlay_upper.scan(fd) if fd is not None else ():
                    absolute = posixpath.join(under, f.path)
                    if plain and (
                        bwrap.under(absolute, not_its)
                        or (absolute in ours and self._links_to(absolute, ours[absolute]))
                    ):
                        continue
                    if not out.add(posixpath.join(prefix, f.path), gone=f.gone and not plain):
                        return out
                    if f.hides and not plain:
                        hides.append(f.path)
                for path in hides:
                    lower = Path("/") / top.relative_to(self._folder / "upper")
                    for name in overlay_upper.listing(lower, f"{inner}/{path}", but=masked):
                        if not out.add(posixpath.join(prefix, path, name), gone=True):
                            return out
            if plain and under == "/":
                out.gone |= {path[1:] for path in ours if not os.path.lexists(top / path[1:])}
        return out

    def _links_to(self, path: str, target: str) -> bool:
        at = self._folder / "fs" / path[1:]
        return at.is_symlink() and os.readlink(at) == target


def _readlink(top: Path) -> Callable[[str], str | None]:
    """Where links of the tree `top` lead. What changes meanwhile makes it another path of that tree."""

    def readlink(path: str) -> str | None:
        try:
            return os.readlink(top / path[1:])
        except OSError:
            return None

    return readlink
