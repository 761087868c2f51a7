"""One sandbox of the `local` runtime: a folder, and commands run in it inside bubblewrap or plainly."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Unpack

from polar.changes import decode, encode
from polar.errors import InfraError
from polar.sandbox import ExecResult
from runtimes import bwrap, cgroups, host_files, local_changes, local_root, procs, tree
from runtimes.bounds import Kept, bounded, shell
from runtimes.inroot import Root
from runtimes.local_box import Command, Record, boxed, may_be_top
from runtimes.local_cow import Cow
from runtimes.paths import inside
from runtimes.pidspace import EXEC_MARK, others
from runtimes.supervise import supervise

MARK = "POLAR_SANDBOX"  # in the environment of everything that a sandbox runs
# The sandbox dies before the worker when memory runs short, and leaves no core files.
_SHELL = 'echo 500 >/proc/self/oom_score_adj 2>/dev/null; ulimit -c 0; {limits} cd -- "$0" || exit 126; unset OLDPWD; exec "$@"'
_ULIMIT = {
    "address_space_mb": ("v", 1024),
    "file_size_mb": ("f", 2048),
    "open_files": ("n", 1),
    "cpu_seconds": ("t", 1),
}


class Place(Protocol):
    """The part of the runtime that a sandbox needs."""

    root: Path
    data_dir: Path

    def record_path(self, sandbox_id: str) -> Path: ...


@contextlib.contextmanager
def _plain(argv: list[str], env: dict[str, str]) -> Iterator[Command]:
    yield Command(argv, (), lambda: None, lambda result: None, env)


class LocalSandbox:
    def __init__(self, place: Place, record: Record):
        self.ref = record.ref
        self._place = place
        self._record = record
        self._folder = place.root / record.ref.handle
        self._files = self._folder / "fs"
        self._boxed = record.ref.state.get("isolation") != "none"
        self._root = Root(self._files, as_host=not self._boxed)
        limits = cgroups.Limits(cpus=record.cpus, memory=record.memory, pids=record.pids)
        self._group = cgroups.Group(cgroups.find() if record.grouped else "", record.ref.handle, limits)
        self._cow = Cow(record, self._folder, place.data_dir, self.stop) if record.cow else None

    def make(self) -> None:
        self._group.make()
        inner = self.ref.workdir if self._boxed else "/work"
        for path in (*self._record.mounts, "/tmp", bwrap.HOME, inner):
            (self._files / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for v in self._record.volumes:
            if not os.path.exists(v.source):
                raise FileNotFoundError(errno.ENOENT, "no such volume source", v.source)
            place = self._files / v.target.lstrip("/")
            if bwrap.under(v.target, tuple(self._record.mounts)):
                place.mkdir(exist_ok=True) if os.path.isdir(v.source) else place.touch()
        if self._cow:
            self._cow.make()

    # -- commands

    def exec(
        self,
        argv: list[str] | str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
        **kept: Unpack[Kept],
    ) -> ExecResult:
        if not self._files.is_dir():
            raise InfraError(f"sandbox '{self.ref.handle}' is gone", code="exec_failed")
        holding = self._cow.holder() if self._cow else None
        mark = secrets.token_hex(12)
        self._group.again()
        inner = ["/bin/sh", "-c", _SHELL.format(limits=self._limits()), inside(self.ref, cwd or ""), *shell(argv)]
        begun, before = procs.ticks_now(), self._members()

        def kill(pid: int) -> None:
            entry = f"{EXEC_MARK}={mark}".encode()

            def ours(all: dict[int, procs.Proc]) -> set[int]:
                seeds = {p for p in all if p == pid or procs.environ_has(p, entry)}
                # Of those that hid from this, their control group knows.
                late = {p for p, start in self._members() - before if start >= begun and not others(p, entry)}
                return procs.with_family(seeds, all) | late

            if not procs.kill_all(ours):
                self.stop()

        folder = self._folder if self._cow else self._files
        # What its processes are found by, on both sides of the walls.
        marks = {MARK: self.ref.handle, EXEC_MARK: mark}
        entered = self._command(inner, holding, {**self._env(env), **marks})
        with bounded(timeout, folder, self._record.disk, **kept) as bounds, entered as box:
            result = supervise(
                self._group.entering(box.argv),
                env={**box.env, **marks},
                cwd=None if self._boxed else str(self._files),
                stdin=stdin,
                watch=bounds.watch,
                output=bounds.output,
                kill=kill,
                pass_fds=box.fds,
                spawned=box.spawned,
            )
            box.verify(result)
            return bounds.disk.told(result)

    def _command(
        self, inner: list[str], holding: procs.Proc | None, env: dict[str, str]
    ) -> contextlib.AbstractContextManager[Command]:
        if self._boxed:
            return boxed(self._record, self._files, self._place.data_dir, inner, holding, env)
        return _plain(inner, env)

    def _members(self) -> set[tuple[int, int]]:
        """(pid, start) of what is in the control group."""
        return {(p.pid, p.start) for p in map(procs.read, self._group.members()) if p}

    def _env(self, extra: dict[str, str] | None) -> dict[str, str]:
        """The whole environment: nothing of the host's gets in."""
        tmp = "/tmp" if self._boxed else str(self._files / "tmp")
        home = self.ref.state["home"]
        base = {"PATH": bwrap.PATH, "HOME": home, "TMPDIR": tmp, "LANG": "C.UTF-8"}
        return {**base, **self._record.env, **(extra or {})}

    def _limits(self) -> str:
        return "".join(
            f"ulimit -{flag} {value * factor} || exit 126; "
            for name, value in self._record.rlimits.items()
            for flag, factor in [_ULIMIT[name]]
        )

    # -- files

    def _view(self, code: str) -> contextlib.AbstractContextManager[Root]:
        """The sandbox's files as its commands see them. Errors are told under `code`."""
        return self._cow.files(code) if self._cow else contextlib.nullcontext(self._root)

    def _writable_path(self, target: str, *, folder: bool = False) -> str:
        path = inside(self.ref, target)
        if self._cow:
            if bwrap.under(path, local_root.OWN):
                raise InfraError(
                    f"can't write to '{path}': it is made anew for each command", code="upload_failed", retryable=False
                )
        elif self._boxed:
            parts = [p for p in path.split("/") if p not in ("", ".")]
            top = "/" + parts[0] if parts else "/"
            if not bwrap.under(path, tuple(self._record.mounts)) and not (
                len(parts) > (0 if folder else 1) and may_be_top(self._record, top)
            ):
                raise InfraError(
                    f"can't write to '{path}': the 'local' runtime keeps it read-only; "
                    f"writable are {', '.join(self._record.mounts)} and new top folders",
                    code="upload_failed",
                    retryable=False,
                )
        return path

    def upload(self, source: Path, target: str, *, mode: int | None = None) -> None:
        path = self._writable_path(target, folder=source.is_dir())
        with self._view("upload_failed") as root:
            host_files.upload(root, source, path, mode)

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None:
        path = self._writable_path(target)
        with self._view("upload_failed") as root:
            host_files.write(root, path, data, mode)

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        with self._view("artifact_failed") as root:
            return host_files.download(root, inside(self.ref, source), target, limit)

    def baseline(self, under: str) -> bytes:
        path = inside(self.ref, under)
        return encode(self._cow.listing(path) if self._cow else local_changes.listing(self._root, path))

    def changes(self, target: Path, *, under: str, baseline: bytes, limit: int) -> bool:
        path, before = inside(self.ref, under), set(decode(baseline))
        if self._cow:
            return self._cow.write(target, path, before, limit)
        return local_changes.write(self._root, path, before, target, limit)

    # -- the end

    def stop(self) -> None:
        self._end(with_holder=False)

    def _end(self, with_holder: bool) -> None:
        entry, handle = f"{MARK}={self.ref.handle}".encode(), self.ref.handle.encode()

        def ours(all: dict[int, procs.Proc]) -> set[int]:
            known = self._group.members()
            seeds = {
                p
                for p in all
                if p in known
                or procs.environ_has(p, entry)
                or (procs.argv_has(p, handle) and procs.argv_has(p, b"--hostname"))
                or (with_holder and self._cow and self._cow.is_holder(p))
            }
            return procs.with_family(seeds, all)

        self._group.kill()
        if not procs.kill_all(ours, timeout=10):
            raise InfraError(f"processes of sandbox '{self.ref.handle}' can't be killed", code="exec_failed")

    def destroy(self) -> None:
        record = self._place.record_path(self.ref.handle)
        if not record.exists() and not self._folder.exists():
            return
        try:
            if self._cow:
                self._cow.end(self._end)
            else:
                self.stop()
            self._group.remove()
            tree.remove(self._folder)
            record.unlink(missing_ok=True)
        except OSError as e:
            raise InfraError(f"can't remove '{self._folder}': {e}", code="exec_failed") from e
