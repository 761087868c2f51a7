"""One sandbox of the `local` runtime: a folder, and commands run in it inside bubblewrap or plainly."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec import Struct, field

from polar.errors import InfraError, NotFound, UnsupportedSpec
from polar.sandbox import ExecResult, ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec, Volume
from runtimes import bwrap, forward, procs, tree
from runtimes.inroot import Escape, Root
from runtimes.output import Output
from runtimes.paths import inside
from runtimes.supervise import supervise
from runtimes.watch import Watch

MARK = "POLAR_SANDBOX"  # in the environment of everything that a sandbox runs
EXEC_MARK = "POLAR_EXEC"
# The sandbox dies before the worker when memory runs short, and leaves no core files.
_SHELL = 'echo 500 >/proc/self/oom_score_adj 2>/dev/null; ulimit -c 0; {limits} cd -- "$0" || exit 126; unset OLDPWD; exec "$@"'
_ULIMIT = {
    "address_space_mb": ("v", 1024),
    "file_size_mb": ("f", 2048),
    "open_files": ("n", 1),
    "cpu_seconds": ("t", 1),
}


class Record(Struct, kw_only=True):
    """What is kept of a sandbox on this host; private to it, since `env` may hold secrets. `proxy` is set where its
    listener must be brought inside."""

    ref: SandboxRef
    env: dict[str, str] = field(default_factory=dict)
    network: str = "none"
    proxy: ProxyEndpoint | None = None
    volumes: list[Volume] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    rlimits: dict[str, int] = field(default_factory=dict)


class Place(Protocol):
    """The part of the runtime that a sandbox needs."""

    root: Path
    data_dir: Path

    def record_path(self, sandbox_id: str) -> Path: ...


def mount_points(spec: RuntimeSpec) -> tuple[str, ...]:
    """The writable folders of a boxed sandbox. Raises UnsupportedSpec for a place that can't be writable, or safe: a
    mount may not lie below a folder that the agent could exchange for a link, since mounting would follow it. What lies
    directly in a mounted folder can't be exchanged, being a mount point itself."""
    workdir = (spec.workdir or "/work").rstrip("/")
    if not workdir or ".." in workdir.split("/"):
        raise UnsupportedSpec(f"runtime.workdir: '{spec.workdir}' can't be a sandbox's working directory")
    if bwrap.under(workdir, bwrap.OWN):
        raise UnsupportedSpec(f"runtime.workdir: '{workdir}' is in a folder that the 'local' runtime keeps read-only")
    outer: list[str] = []
    for path in sorted({workdir, bwrap.HOME, "/tmp"}):
        if not bwrap.under(path, tuple(outer)):
            outer.append(path)
    for path in [*bwrap.python(), "/run"]:
        if bwrap.under(path, tuple(outer)) or bwrap.under(workdir, (path,)):
            raise UnsupportedSpec(f"runtime.workdir: '{workdir}' overlaps '{path}', which must stay read-only")
    for i, v in enumerate(spec.volumes):
        parent = v.target.rpartition("/")[0]
        below = parent not in outer and bwrap.under(parent, tuple(outer))
        if below or bwrap.under(v.target, bwrap.OWN) or any(bwrap.under(p, (v.target,)) for p in outer):
            raise UnsupportedSpec(f"runtime.volumes[{i}].target: '{v.target}' overlaps a folder of the sandbox's own")
    return tuple(outer)


class LocalSandbox:
    def __init__(self, place: Place, record: Record):
        self.ref = record.ref
        self._place = place
        self._record = record
        self._folder = place.root / record.ref.handle
        self._files = self._folder / "fs"
        self._boxed = record.ref.state.get("isolation") != "none"
        self._root = Root(self._files, as_host=not self._boxed)

    def make(self) -> None:
        for path in self._record.mounts or ["/work", bwrap.HOME, "/tmp"]:
            (self._files / path.lstrip("/")).mkdir(parents=True, exist_ok=True)
        inner = self.ref.workdir if self._boxed else "/work"
        (self._files / inner.lstrip("/")).mkdir(parents=True, exist_ok=True)
        (self._files / bwrap.HOME.lstrip("/")).mkdir(parents=True, exist_ok=True)
        for v in self._record.volumes:
            place = self._files / v.target.lstrip("/")
            if bwrap.under(v.target, tuple(self._record.mounts)):
                place.mkdir(exist_ok=True) if os.path.isdir(v.source) else place.touch()

    # -- commands

    def exec(
        self,
        argv: list[str] | str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
        log: Path | None = None,
        output_limit: int = 64 * 1024,
        log_limit: int = 16 * 1024 * 1024,
        cancelled: Callable[[], bool] | None = None,
    ) -> ExecResult:
        if not self._files.is_dir():
            raise InfraError(f"sandbox '{self.ref.handle}' is gone", code="exec_failed")
        watch = Watch(timeout, cancelled)
        mark = secrets.token_hex(12)
        command = ["/bin/sh", "-c", argv] if isinstance(argv, str) else argv
        inner = ["/bin/sh", "-c", _SHELL.format(limits=self._limits()), inside(self.ref, cwd or ""), *command]
        output = Output(output_limit, log, log_limit)

        def kill(pid: int) -> None:
            entry = f"{EXEC_MARK}={mark}".encode()
            procs.kill_all(
                lambda all: procs.with_family({p for p in all if p == pid or procs.environ_has(p, entry)}, all)
            )

        try:
            with contextlib.ExitStack() as stack:
                full, fds, spawned = self._wrap(inner, stack) if self._boxed else (inner, (), lambda: None)
                return supervise(
                    full,
                    env=self._env(env, mark),
                    cwd=None if self._boxed else str(self._files),
                    stdin=stdin,
                    watch=watch,
                    output=output,
                    kill=kill,
                    pass_fds=fds,
                    spawned=spawned,
                )
        finally:
            output.close()

    def _env(self, extra: dict[str, str] | None, mark: str) -> dict[str, str]:
        """The whole environment: nothing of the host's gets in."""
        tmp = "/tmp" if self._boxed else str(self._files / "tmp")
        home = self.ref.state["home"]
        base = {"PATH": bwrap.PATH, "HOME": home, "TMPDIR": tmp, "LANG": "C.UTF-8"}
        return {**base, **self._record.env, **(extra or {}), MARK: self.ref.handle, EXEC_MARK: mark}

    def _limits(self) -> str:
        return "".join(
            f"ulimit -{flag} {value * factor} || exit 126; "
            for name, value in self._record.rlimits.items()
            for flag, factor in [_ULIMIT[name]]
        )

    def _wrap(
        self, inner: list[str], stack: contextlib.ExitStack
    ) -> tuple[list[str], tuple[int, ...], Callable[[], None]]:
        """bubblewrap's argument vector, the descriptors it inherits, and what to do once it has them."""
        found = bwrap.find()
        if isinstance(found, str):
            raise InfraError(f"bubblewrap doesn't work any more: {found}", code="exec_failed")
        fds: list[int] = []
        spawned: Callable[[], None] = lambda: None  # noqa: E731
        if self._record.proxy is not None:
            mine, theirs = socket.socketpair()
            serving = forward.forwarder().serve_from(mine, bwrap.receive_listener, self._record.proxy)
            stack.callback(serving.close)
            stack.callback(theirs.close)
            fds.append(theirs.fileno())
            spawned = theirs.close
            inner = bwrap.listening(inner, theirs.fileno(), forward.PORT)
        return [*self._bwrap_args(found), "--", *inner], tuple(fds), spawned

    def _bwrap_args(self, found: bwrap.Bwrap) -> list[str]:
        # The host name is the sandbox's id, so that the process can be found by it.
        args = [found.binary, *found.flags, "--hostname", self.ref.handle, "--die-with-parent", "--new-session"]
        if self._record.network != "internet":
            args += ["--unshare-net"]
        args += bwrap.system_binds()
        beside = bwrap.environment(self._taken())
        args += [arg for path in beside for arg in ("--ro-bind", path, path)]
        if bwrap.under(str(self._place.data_dir), (*bwrap.SYSTEM, *bwrap.python(), *beside)):
            args += ["--tmpfs", str(self._place.data_dir)]
        if self._record.network == "internet":
            args += bwrap.resolver_binds()
        for path in self._writable():
            args += ["--bind", str(self._files / path.lstrip("/")), path]
        for v in self._record.volumes:
            args += ["--ro-bind", v.source, v.target]
        # A read-only root: what can't last must not seem to.
        return [*args, "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/run", "--remount-ro", "/"]

    def _writable(self) -> list[str]:
        """The mount points, and the top folders that uploads made beside them."""
        tops = {"/" + e.name for e in os.scandir(self._files) if e.is_dir(follow_symlinks=False)}
        return [*self._record.mounts, *sorted(t for t in tops if self._may_be_top(t))]

    def _may_be_top(self, top: str) -> bool:
        taken = [*self._taken(), *bwrap.python(), *bwrap.OWN, "/run", "/home"]
        return not any(bwrap.under(t, (top,)) for t in taken)

    def _taken(self) -> list[str]:
        return [*self._record.mounts, *(v.target for v in self._record.volumes)]

    # -- files

    def _writable_path(self, target: str, *, folder: bool = False) -> str:
        path = inside(self.ref, target)
        if self._boxed:
            parts = [p for p in path.split("/") if p not in ("", ".")]
            top = "/" + parts[0] if parts else "/"
            if not bwrap.under(path, tuple(self._record.mounts)) and not (
                len(parts) > (0 if folder else 1) and self._may_be_top(top)
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
        with self._uploading(target):
            if source.is_dir():
                self._root.put_tree(source, path, mode)
            else:
                with open(source, "rb") as f:
                    self._root.write(path, f, source.stat().st_mode & 0o777 if mode is None else mode)

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None:
        path = self._writable_path(target)
        with self._uploading(target):
            self._root.write(path, io.BytesIO(data), mode)

    @contextlib.contextmanager
    def _uploading(self, target: str):
        try:
            yield
        except Escape as e:
            raise InfraError(f"can't write to '{target}': {e.strerror}", code="upload_failed", retryable=False) from e
        except OSError as e:
            raise InfraError(f"can't write to '{target}': {e.strerror or e}", code="upload_failed") from e

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        try:
            with self._root.locate(inside(self.ref, source)) as (fd, name):
                os.stat(name, dir_fd=fd, follow_symlinks=False)
                return tree.write_tree(tree.walk(fd, name), target, limit)
        except (FileNotFoundError, NotADirectoryError, Escape) as e:
            raise NotFound(f"no '{source}' in the sandbox") from e
        except OSError as e:
            raise InfraError(f"can't read '{source}': {e.strerror or e}", code="artifact_failed") from e

    # -- the end

    def stop(self) -> None:
        entry, handle = f"{MARK}={self.ref.handle}".encode(), self.ref.handle.encode()

        def ours(all: dict[int, procs.Proc]) -> set[int]:
            seeds = {
                p
                for p in all
                if procs.environ_has(p, entry) or (procs.argv_has(p, handle) and procs.argv_has(p, b"--hostname"))
            }
            return procs.with_family(seeds, all)

        if not procs.kill_all(ours, timeout=10):
            raise InfraError(f"processes of sandbox '{self.ref.handle}' can't be killed", code="exec_failed")

    def destroy(self) -> None:
        record = self._place.record_path(self.ref.handle)
        if not record.exists() and not self._folder.exists():
            return
        self.stop()
        try:
            tree.remove(self._folder)
            record.unlink(missing_ok=True)
        except OSError as e:
            raise InfraError(f"can't remove '{self._folder}': {e}", code="exec_failed") from e
