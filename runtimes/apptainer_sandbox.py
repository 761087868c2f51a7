"""One sandbox of the `apptainer` runtime: an instance over an unpacked image, its changes in an overlay folder.

Its first process is Apptainer's own and lies outside of what the agent can signal; `stop` ends it, and with it the kernel
ends every process of the sandbox. What comes afterwards starts the instance anew over the same files, with its start
scripts replaced by empty ones: nothing that the agent left is run.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Unpack

from msgspec import Struct, field

from polar.changes import decode, encode
from polar.errors import InfraError
from polar.sandbox import ExecResult, ProxyEndpoint, SandboxRef
from polar.task import Volume
from runtimes import (
    apptainer_changes,
    apptainer_cli,
    apptainer_exec,
    apptainer_layer,
    cgroups,
    enter,
    host_files,
    listeners,
    procs,
    tree,
)
from runtimes.apptainer_cli import left, message
from runtimes.bounds import Bounds, Kept, bounded, shell, while_ended
from runtimes.inroot import Root
from runtimes.output import Output
from runtimes.paths import inside
from runtimes.pidspace import EXEC_MARK, PidSpace
from runtimes.supervise import supervise
from runtimes.watch import Watch

START_TIMEOUT = 60.0
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Record(Struct, kw_only=True):
    """What is kept of a sandbox on this host; private to it, since `env` may hold secrets. Sizes in bytes."""

    ref: SandboxRef
    rootfs: str = ""
    image_key: str = ""
    env: dict[str, str] = field(default_factory=dict)
    network: str = "none"
    proxy: ProxyEndpoint | None = None
    volumes: list[Volume] = field(default_factory=list)
    gpus: bool = False
    root: bool = False
    filtered: bool = True
    cpus: float | None = None
    memory: int | None = None
    pids: int | None = None
    disk: int | None = None
    layer: apptainer_layer.Kind = "folder"
    open_files: int | None = None


class Place(Protocol):
    """The part of the runtime that a sandbox needs."""

    boxes: Path
    disks: Path
    clean: Path

    def record_path(self, handle: str) -> Path: ...

    def locked(self, handle: str) -> contextlib.AbstractContextManager[None]: ...


class ApptainerSandbox:
    def __init__(self, place: Place, record: Record):
        self.ref = record.ref
        self._place = place
        self._record = record
        self._folder = place.boxes / record.ref.handle
        self._layer = apptainer_layer.layer(
            record.layer, record.ref.handle, self._folder, place.disks, record.disk or 0
        )
        limits = cgroups.Limits(cpus=record.cpus, memory=record.memory, pids=record.pids)
        self._group = cgroups.Group(cgroups.find(), record.ref.handle, limits)

    def make(self, deadline: float) -> None:
        """Raises InfraError, OSError."""
        cli = apptainer_cli.need()
        for path in (self._folder, self._folder / "config"):
            path.mkdir()
            cli.give(path)
            path.chmod(0o700)
        self._group.make()
        with self._place.locked(self.ref.handle):
            self._layer.make(cli)
            first = self._start(cli, left(deadline))
        for inner in (self.ref.workdir, self.ref.state["home"]):
            with self._root(first).locate(inner + "/x", parents=True):
                pass

    # -- the instance

    def _first(self) -> procs.Proc | None:
        """The instance's first process, if it lives."""
        try:
            pid = int((self._folder / "pid").read_text())
        except (OSError, ValueError):
            return None
        return procs.read(pid) if self._is_ours(pid) else None

    def _is_ours(self, pid: int) -> bool:
        return procs.environ_contains(pid, f'"containerID":"{self.ref.handle}"'.encode())

    def _running(self) -> procs.Proc:
        """The living instance's first process; a stopped one is started anew. Raises InfraError."""
        if first := self._first():
            return first
        record = self._place.record_path(self.ref.handle)
        if record.exists():
            cli = apptainer_cli.need()
            with self._place.locked(self.ref.handle):
                if record.exists() and self._folder.is_dir():
                    return self._first() or self._start(cli, START_TIMEOUT)
                if not record.exists():  # removed while this waited, and the lock's file perhaps made anew by that
                    record.with_suffix(".lock").unlink(missing_ok=True)
        raise InfraError(f"sandbox '{self.ref.handle}' is gone", code="exec_failed")

    def _start(self, cli: apptainer_cli.Cli, timeout: float) -> procs.Proc:
        self._group.again()
        self._layer.open()
        pid_file = self._folder / "pid"
        pid_file.unlink(missing_ok=True)
        argv = ["-s", "instance", "start", *self._arguments(), "--pid-file", str(pid_file)]
        prefix = self._group.entering([])
        with apptainer_layer.room(self._layer, cli):
            done = cli.run(
                [*argv, self._record.rootfs, self.ref.handle],
                env=cli.environment(self._folder / "config"),
                timeout=timeout,
                prefix=prefix,
                inner=self._layer.entering,
            )
        first = self._first()
        if done.returncode != 0 or first is None:
            raise InfraError(f"the instance doesn't start: {message(done)}", code="exec_failed")
        return first

    def _arguments(self) -> list[str]:
        r = self._record
        clean = str(self._place.clean)
        out = ["--containall", "--no-home", "--no-mount", "hostfs,tmp,home,cwd", "--overlay", str(self._layer.path)]
        out += ["--fakeroot"] if r.root else ["--userns"]
        if cgroups.ROOT.is_dir():
            # A worker's own delegated groups are writable for its user, who the agent is: out of its sight.
            out += ["-B", f"{clean}/env:{cgroups.ROOT}:ro"]
        if r.network != "internet":
            out += ["--net", "--network", "none"]
        if r.gpus:
            # The driver's libraries are mounted below that folder, so only parts of it can be replaced.
            out += ["--nv", "-B", f"{clean}/env:/.singularity.d/env:ro"]
            out += ["-B", f"{clean}/startscript:/.singularity.d/startscript:ro"]
        else:
            out += ["-B", f"{clean}:/.singularity.d:ro"]
        for v in r.volumes:
            out += ["-B", f"{v.source}:{v.target}:ro"]
        return out

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
        with bounded(timeout, self._layer.path, None if self._layer.bounded else self._record.disk, **kept) as bounds:
            mark = secrets.token_hex(12)

            def once() -> ExecResult:
                first = self._running()
                with self._reachable(first):
                    return self._command(first, shell(argv), env or {}, cwd, stdin, bounds, mark)

            return bounds.disk.told(while_ended(once))

    def _command(
        self,
        first: procs.Proc,
        command: list[str],
        env: dict[str, str],
        cwd: str | None,
        stdin: bytes | None,
        bounds: Bounds,
        mark: str,
    ) -> ExecResult:
        cli = apptainer_cli.need()
        space = PidSpace(first.pid)
        self._group.again()
        target = enter.Inside(
            pid=first.pid,
            start=first.start,
            cwd=inside(self.ref, cwd or ""),
            limits=self._limits(),
            filtered=self._record.filtered,
        )
        before, begun = space.present(with_main=False), procs.ticks_now()

        def kill(pid: int) -> None:
            def ours(all: dict[int, procs.Proc]) -> set[int]:
                return procs.with_family({pid} & all.keys(), all) | space.begun_by(all, mark, begun, before)

            if not procs.kill_all(ours, timeout=5):
                self.stop()

        return apptainer_exec.run(
            cli,
            target,
            command,
            env={"PATH": DEFAULT_PATH, **self._record.env, **env, EXEC_MARK: mark},
            host_env=cli.environment(self._folder / "config"),
            stdin=stdin,
            watch=bounds.watch,
            output=bounds.output,
            kill=kill,
            wrap=self._group.entering,
        )

    def _limits(self) -> dict[str, int]:
        r = self._record
        limits = {"RLIMIT_CORE": 0, "RLIMIT_NPROC": r.pids, "RLIMIT_NOFILE": r.open_files}
        if not self._layer.bounded:
            limits["RLIMIT_FSIZE"] = r.disk
        return {name: value for name, value in limits.items() if value is not None}

    def _reachable(self, first: procs.Proc) -> contextlib.AbstractContextManager[None]:
        if self._record.proxy is None:
            return contextlib.nullcontext()
        return listeners.opened((first.pid, first.start), lambda: self._listen(first), self._record.proxy)

    def _listen(self, first: procs.Proc) -> socket.socket:
        cli = apptainer_cli.need()
        return apptainer_exec.listen(cli, first, host_env=cli.environment(self._folder / "config"))

    # -- files

    def _root(self, first: procs.Proc) -> Root:
        return Root(Path(f"/proc/{first.pid}/root"), owner=apptainer_cli.need().owner, mounted=True)

    @contextlib.contextmanager
    def _files(self, code: str) -> Iterator[Root]:
        try:
            yield self._root(self._running())
        except InfraError as e:
            raise e if e.code != "exec_failed" else InfraError(e.message, code=code, retryable=e.retryable) from e

    def upload(self, source: Path, target: str, *, mode: int | None = None) -> None:
        with self._files("upload_failed") as root:
            host_files.upload(root, source, inside(self.ref, target), mode)

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None:
        with self._files("upload_failed") as root:
            host_files.write(root, inside(self.ref, target), data, mode)

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        with self._files("artifact_failed") as root:
            return host_files.download(root, inside(self.ref, source), target, limit)

    def baseline(self, under: str) -> bytes:
        return encode(apptainer_changes.added(self._written(), Path(self._record.rootfs), inside(self.ref, under)))

    def changes(self, target: Path, *, under: str, baseline: bytes, limit: int) -> bool:
        folder, before = inside(self.ref, under), set(decode(baseline))
        return apptainer_changes.write(self._written(), Path(self._record.rootfs), folder, before, target, limit)

    def _written(self) -> Path:
        """The overlay's upper folder. What a sandbox held that is gone can't be told from nothing."""
        try:
            if self._folder.is_dir():
                with self._place.locked(self.ref.handle):
                    self._layer.open()
                if (upper := self._layer.upper).is_dir():
                    return upper
        except InfraError as e:
            raise InfraError(e.message, code="artifact_failed") from e
        raise InfraError("the sandbox is gone", code="artifact_failed")

    # -- the end

    def _everything(self, all: dict[int, procs.Proc]) -> set[int]:
        """The instance's processes on both sides of its walls, also of one that is just being started. What the agent
        runs can't pretend to belong here, and can't leave its process namespace."""
        handle = self.ref.handle.encode()
        known = self._group.members()
        seeds = {p for p in all if p in known or self._is_ours(p) or _starts(p, handle)}
        spaces = {procs.namespace(p, "pid") for p in seeds} - {"", procs.namespace("self", "pid")}
        return seeds | {p for p in all if procs.namespace(p, "pid") in spaces}

    def stop(self) -> None:
        if not self._folder.exists():
            return
        self._group.kill()
        if not procs.kill_all(self._everything, timeout=15):
            raise InfraError(f"processes of sandbox '{self.ref.handle}' can't be killed", code="exec_failed")

    def destroy(self) -> None:
        record = self._place.record_path(self.ref.handle)
        if not record.exists() and not self._folder.exists():
            return
        with self._place.locked(self.ref.handle):
            self.stop()
            try:
                self._group.remove()
                self._layer.remove()
                if self._folder.exists():
                    self._remove()
                record.unlink(missing_ok=True)
            except OSError as e:
                raise InfraError(f"can't remove sandbox '{self.ref.handle}': {e}", code="exec_failed") from e
            record.with_suffix(".lock").unlink(missing_ok=True)

    def _remove(self) -> None:
        try:
            tree.remove(self._folder)
        except PermissionError:
            # Files of users that only exist inside (`user: root`): their owner may map them again.
            cli = apptainer_cli.need()
            argv = ["unshare", "--user", "--map-root-user", "--map-auto", "--", "rm", "-rf", "--", str(self._folder)]
            supervise(
                cli.as_owner(argv),
                env=cli.environment(self._folder),
                cwd="/",
                stdin=None,
                watch=Watch(300, None),
                output=Output(0, None, 0),
                kill=lambda pid: None,
            )
            if self._folder.exists():
                raise


def _starts(pid: int, handle: bytes) -> bool:
    """Is it Apptainer's own process, starting or watching over the instance?"""
    return procs.argv_contains(pid, handle) and (
        procs.argv_has(pid, b"--pid-file") or procs.argv_contains(pid, b"Apptainer instance")
    )
