"""One sandbox of the `docker` runtime: a container whose first process only waits."""

from __future__ import annotations

import contextlib
import io
import logging
import posixpath
import secrets
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Unpack, cast

from docker.errors import APIError
from docker.errors import NotFound as EngineNotFound

from polar.changes import decode, encode
from polar.errors import InfraError, NotFound
from polar.sandbox import ExecResult, ProxyEndpoint, SandboxRef
from polar.task import Prepare
from runtimes import docker_bridge, docker_changes, docker_exec, docker_prepared, netns, procs, tree
from runtimes.bounds import Bounds, Ended, Kept, bounded, outcome, shell, while_ended
from runtimes.docker_engine import Engine, ignore
from runtimes.docker_reader import Reader
from runtimes.links import resolved
from runtimes.output import Output
from runtimes.paths import inside
from runtimes.pidspace import EXEC_MARK, PidSpace
from runtimes.watch import Watch

log = logging.getLogger("polar.docker")

TRANSFER_TIMEOUT = 600.0  # seconds for one download; for an upload's answer
_SPOOL = 8 << 20  # bytes of an upload kept in memory
_MOUNTED = ("/dev", "/proc", "/sys")  # the engine says yes to uploads there, and they vanish
_LINKS = 10
_SYMLINK = 1 << 27  # in the mode that the engine tells


class DockerSandbox:
    def __init__(self, engine: Engine, ref: SandboxRef):
        self.ref = ref
        self._engine = engine
        state = ref.state
        self._user = state.get("user", "")
        self._owner = (int(state.get("uid", "0")), int(state.get("gid", "0")))
        self._proxy = (
            ProxyEndpoint(url=state["proxy_url"], socket=state.get("proxy_socket") or None)
            if "bridge" in state
            else None
        )

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
        state = self.ref.state
        with bounded(timeout, Path(state.get("upper", "")), int(state.get("disk", "0")) or None, **kept) as bounds:
            code = while_ended(lambda: self._command(shell(argv, "sh"), env or {}, cwd, stdin, bounds))
            return bounds.disk.told(outcome(code, bounds.watch, bounds.output))

    def _command(
        self,
        command: list[str],
        env: dict[str, str],
        cwd: str | None,
        stdin: bytes | None,
        bounds: Bounds,
    ) -> int | None:
        mark = secrets.token_hex(12)
        with self._existing(), self._reachable() as pid:
            space = self._space(pid)
            before = space.present(with_main=True) if space else set()
            begun = procs.ticks_now()
            try:
                code = docker_exec.run(
                    self._engine,
                    self.ref.handle,
                    command,
                    env={**env, EXEC_MARK: mark},
                    cwd=inside(self.ref, cwd or ""),
                    user=self._user,
                    stdin=stdin,
                    watch=bounds.watch,
                    output=bounds.output,
                )
            except Ended:
                raise
            except BaseException:
                with contextlib.suppress(InfraError, EngineNotFound):
                    self._kill(pid, mark, begun, before)
                raise
            if code is None:
                self._kill(pid, mark, begun, before)
            return code

    def _state(self, code: str) -> dict[str, Any]:
        """Of the container. Raises InfraError `code` if it is gone: what it held can't be told from nothing then."""
        try:
            with self._engine.call(code=code) as api:
                return api.inspect_container(self.ref.handle)["State"]
        except EngineNotFound as e:
            raise InfraError(f"container {self.ref.handle[:12]} is gone", code=code) from e

    @contextlib.contextmanager
    def _existing(self) -> Iterator[None]:
        try:
            yield
        except EngineNotFound as e:
            raise InfraError(f"container {self.ref.handle[:12]} is gone", code="exec_failed") from e

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[int]:
        """A running container (a stopped one starts anew, without the processes it had) that reaches the proxy; gives
        the pid of its first process."""
        pid = self._running()
        bridge = self.ref.state.get("bridge")
        if bridge == docker_bridge.NAMESPACE and self._proxy:
            with docker_bridge.opened(self.ref.handle, pid, self._proxy):
                yield pid
            return
        if bridge == docker_bridge.RELAY and self._proxy and self._proxy.socket:
            self.start_relay(self._proxy.socket)
        yield pid

    def _running(self) -> int:
        with self._engine.call() as api:
            state = api.inspect_container(self.ref.handle)["State"]
            if not state["Running"]:
                api.start(self.ref.handle)
                state = api.inspect_container(self.ref.handle)["State"]
        return int(state["Pid"])

    def start_relay(self, socket_path: str) -> None:
        output = Output(4096, None, 0)
        code = docker_exec.run(
            self._engine,
            self.ref.handle,
            docker_bridge.relay_command(socket_path),
            env={},
            cwd="/",
            user="0:0",  # the agent shall not end it, and the socket is a host user's,
            stdin=None,
            watch=Watch(30, None),
            output=output,
        )
        if code == 3:
            raise InfraError(
                "the image has neither python3 nor socat, and only with one of them can the proxy be brought inside here",
                code="runtime_create_failed",
                retryable=False,
            )
        if code != 0:
            text = output.tail.decode("utf-8", "replace").strip()
            raise InfraError(f"the relay to the proxy doesn't start: {text or code}", code="exec_failed")

    def _kill(self, pid: int, mark: str, begun: int, before: set[tuple[int, int]]) -> None:
        """End what a command started. Where the processes can't be seen, or resist, everything in the container is
        ended; its files stay."""
        space = self._space(pid)
        if space and procs.kill_all(lambda all: space.begun_by(all, mark, begun, before), timeout=3):
            return
        self.stop()
        self._running()

    def _space(self, pid: int) -> PidSpace | None:
        """None if its processes can't be seen: the engine is elsewhere, or this process has a pid namespace of its own."""
        if not (docker_bridge.may_enter() and netns.is_container(pid, self.ref.handle)):
            return None
        space = PidSpace(pid)
        return space if space.name else None

    # -- files

    def upload(self, source: Path, target: str, *, mode: int | None = None) -> None:
        def fill(tar: tarfile.TarFile, name: str) -> None:
            tar.add(source, arcname=name, filter=lambda m: self._own(m, mode))

        self._put(target, fill)

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None:
        def fill(tar: tarfile.TarFile, name: str) -> None:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), int(time.time())
            tar.addfile(cast(tarfile.TarInfo, self._own(info, mode)), io.BytesIO(data))

        self._put(target, fill)

    def give(self, folder: str) -> None:
        """Make `folder` the user's own."""

        def fill(tar: tarfile.TarFile, name: str) -> None:
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(cast(tarfile.TarInfo, self._own(info, None)))

        self._put(folder, fill, parents=False)

    def _own(self, info: tarfile.TarInfo, mode: int | None) -> tarfile.TarInfo | None:
        info.uid, info.gid = self._owner
        info.uname = info.gname = ""
        if mode is not None and info.isreg():
            info.mode = mode
        info.mode &= 0o1777
        return info

    def _put(self, target: str, fill: Callable[[tarfile.TarFile, str], None], *, parents: bool = True) -> None:
        path = posixpath.normpath(inside(self.ref, target))
        if any(path == m or path.startswith(m + "/") for m in _MOUNTED) or path == "/":
            raise InfraError(f"can't write to '{path}'", code="upload_failed", retryable=False)
        try:
            with tempfile.SpooledTemporaryFile(max_size=_SPOOL) as spool:
                with tarfile.open(fileobj=spool, mode="w") as tar:
                    fill(tar, path.lstrip("/"))
                spool.seek(0)
                if self._owner[0] and parents:
                    self._make_parent(posixpath.dirname(path))
                with self._engine.call(timeout=TRANSFER_TIMEOUT, code="upload_failed", lane="files") as api:
                    api.put_archive(self.ref.handle, "/", spool)
        except EngineNotFound as e:
            raise InfraError(f"container {self.ref.handle[:12]} is gone", code="upload_failed") from e
        except OSError as e:
            raise InfraError(f"can't upload to '{target}': {e}", code="upload_failed") from e

    def _make_parent(self, folder: str) -> None:
        """Folders that the engine makes by itself would be root's."""
        done = self.exec(["mkdir", "-p", folder], cwd="/", timeout=30)
        if done.exit_code != 0:
            text = done.output.decode("utf-8", "replace").strip()
            raise InfraError(f"can't make '{folder}': {text}", code="upload_failed", retryable=False)

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        path = inside(self.ref, source)
        while path.endswith("/."):  # the engine would leave the common name out of the archive
            path = path[:-2] or "/"
        try:
            with self._engine.call(timeout=TRANSFER_TIMEOUT, code="artifact_failed", lane="files") as api:
                for _ in range(_LINKS):
                    chunks, stat = docker_changes.archive(api, self.ref.handle, path)
                    try:
                        if not stat["mode"] & _SYMLINK:
                            with tarfile.open(fileobj=cast(BinaryIO, Reader(chunks)), mode="r|") as tar:
                                return tree.write_tree(tree.from_tar(tar), target, limit)
                    finally:
                        chunks.close()
                    # Resolved by the engine, within the container.
                    path = stat["linkTarget"] or path
        except EngineNotFound:
            pass
        except (OSError, tarfile.TarError) as e:
            raise InfraError(f"can't download '{source}': {e}", code="artifact_failed") from e
        self._state("artifact_failed")
        raise NotFound(f"no '{source}' in the sandbox")

    def baseline(self, under: str) -> bytes:
        self._state("artifact_failed")
        return encode(docker_changes.difference(self._engine, self.ref.handle, self._folder(under)).added)

    def changes(self, target: Path, *, under: str, baseline: bytes, limit: int) -> bool:
        folder = self._folder(under)
        self._state("artifact_failed")
        docker_changes.exists(self._engine, self.ref.handle, folder)
        before = set(decode(baseline))
        return docker_changes.write(self._engine, self.ref.handle, folder, before, target, limit)

    def _folder(self, under: str) -> str:
        """Without links: the engine tells of a change where it lies."""

        def readlink(path: str) -> str | None:
            with contextlib.suppress(EngineNotFound), self._engine.call(code="artifact_failed") as api:
                chunks, stat = docker_changes.archive(api, self.ref.handle, path)
                chunks.close()
                return stat["linkTarget"] if stat["mode"] & _SYMLINK else None
            return None

        try:
            return resolved(inside(self.ref, under), readlink)
        except NotADirectoryError as e:
            raise NotFound(f"no '{under}' in the sandbox") from e

    # -- preparation

    def is_prepared(self, steps: list[Prepare]) -> bool:
        return docker_prepared.checked(self.ref.state, steps)

    def keep_prepared(self, steps: list[Prepare]) -> None:
        tag = self.ref.state.get("tag")
        if not tag or self.ref.state["steps"] != docker_prepared.name_of(steps):
            return
        try:
            docker_prepared.keep(self._engine, self.ref.handle, tag)
        except (InfraError, EngineNotFound) as e:
            log.warning("the prepared sandbox isn't kept: %s", e)

    # -- the end

    def stop(self) -> None:
        """The kernel ends all processes of the container with its first one."""
        try:
            with self._engine.call() as api:
                try:
                    api.kill(self.ref.handle)
                except APIError as e:
                    if "can only kill running" not in str(e.explanation):  # Podman's word for the same
                        ignore(e, 409)  # it doesn't run
                deadline = time.monotonic() + 15
                while api.inspect_container(self.ref.handle)["State"]["Running"]:
                    if time.monotonic() > deadline:
                        raise InfraError(f"container {self.ref.handle[:12]} can't be stopped", code="exec_failed")
                    time.sleep(0.05)
        except EngineNotFound:
            pass

    def destroy(self) -> None:
        with contextlib.suppress(EngineNotFound), self._engine.call() as api:
            try:
                api.remove_container(self.ref.handle, force=True, v=True)
            except APIError as e:
                ignore(e, 404, 409)  # somebody else is at it
