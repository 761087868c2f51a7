"""The `docker` runtime: a container per sandbox, without capabilities, and by default without a network.

Defaults where the spec says nothing: 4 GiB of memory (no swap), 512 processes. Images are looked for on the engine only,
unless `options.pull` allows to fetch a missing one.
"""

from __future__ import annotations

import logging
import os
import posixpath
import threading
import time
from pathlib import Path
from typing import Any

from docker.errors import ImageNotFound
from docker.errors import NotFound as EngineNotFound
from docker.types import DeviceRequest, Mount, Ulimit
from msgspec import Struct
from msgspec.structs import replace

from polar.codec import from_json, to_json
from polar.config import Settings
from polar.errors import InfraError, PolarError, UnsupportedSpec
from polar.ids import new_id
from polar.sandbox import ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec
from runtimes import docker_bridge, netns
from runtimes.docker_engine import Engine, translated
from runtimes.docker_sandbox import DockerSandbox
from runtimes.forward import INSIDE_URL
from runtimes.options import check_volumes, read_options

log = logging.getLogger("polar.docker")

DEFAULT_MEMORY_MB = 4096
DEFAULT_PIDS = 512
DEFAULT_WORKDIR = "/work"
LABEL_REF = "polar.ref"  # the whole reference: what is found by its labels can be attached to
PROBE_TIMEOUT = 5.0


class Options(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`user` runs the commands ("name", "uid" or "uid:gid"); the image's own otherwise."""

    user: str | None = None
    pull: bool = False


class DockerRuntime:
    name = "docker"

    def __init__(self, settings: Settings):
        self._data_dir = str(Path(settings.data_dir).resolve())
        self._engine = Engine()
        self._pulls: dict[str, threading.Lock] = {}
        self._enters: bool | None = None  # can containers' namespaces be entered? None: not tried yet

    def check(self, spec: RuntimeSpec) -> None:
        read_options(spec, Options, self.name)
        check_volumes(spec, self._data_dir)
        if not spec.image:
            raise UnsupportedSpec("runtime.image: the 'docker' runtime needs one")
        if spec.workdir and posixpath.normpath(spec.workdir) != spec.workdir:
            raise UnsupportedSpec(f"runtime.workdir: '{spec.workdir}' is not a plain absolute path")

    def available(self) -> tuple[bool, str]:
        try:
            with self._engine.call(timeout=PROBE_TIMEOUT, code="runtime_create_failed") as api:
                return True, f"Docker {api.version().get('Version', '?')}"
        except PolarError as e:
            return False, e.message

    # -- making one

    def create(
        self, spec: RuntimeSpec, *, labels: dict[str, str], proxy: ProxyEndpoint | None, timeout: float
    ) -> DockerSandbox:
        self.check(spec)
        deadline = time.monotonic() + timeout
        options = read_options(spec, Options, self.name)
        image = self._image(spec, options, deadline)
        proxy = proxy if spec.network != "none" else None
        while True:
            bridge = self._bridge(proxy)
            try:
                return self._create(spec, options, image, labels, proxy, bridge, deadline)
            except _CantEnter as e:
                log.info("containers' networks can't be entered from here (%s): the proxy comes in by a relay", e)
                self._enters = False

    def _bridge(self, proxy: ProxyEndpoint | None) -> str | None:
        if proxy is None:
            return None
        if self._enters is None:
            with translated("runtime_create_failed"):
                self._enters = docker_bridge.may_enter() and self._engine.is_local()
        if self._enters:
            return docker_bridge.NAMESPACE
        if not proxy.socket:
            raise InfraError(
                "the proxy can't be brought into containers: that needs root on the engine's machine, or a proxy with a "
                "Unix socket (setting proxy_socket)",
                code="runtime_create_failed",
                retryable=False,
            )
        return docker_bridge.RELAY

    def _create(
        self,
        spec: RuntimeSpec,
        options: Options,
        image: dict[str, Any],
        labels: dict[str, str],
        proxy: ProxyEndpoint | None,
        bridge: str | None,
        deadline: float,
    ) -> DockerSandbox:
        config = image.get("Config") or {}
        user = options.user if options.user is not None else config.get("User") or ""
        home = spec.env.get("HOME") or "/root"
        workdir = spec.workdir or config.get("WorkingDir") or DEFAULT_WORKDIR
        state = {"home": home, "user": user}
        if bridge and proxy:
            state |= {"bridge": bridge, "proxy_url": proxy.url, "proxy_socket": proxy.socket or ""}
        ref = SandboxRef(
            backend=self.name,
            handle=new_id("polar"),  # a name first; the container's id as soon as there is one
            proxy_url=INSIDE_URL if bridge else "",
            workdir="/" + workdir.strip("/"),
            labels=dict(labels),
            state=state,
        )
        sandbox = DockerSandbox(self._engine, ref)
        try:
            with self._engine.call(timeout=_left(deadline), code="runtime_create_failed") as api:
                made = api.create_container_from_config(self._config(api, spec, ref, labels, proxy, bridge), ref.handle)
                ref = replace(ref, handle=made["Id"])
                sandbox = DockerSandbox(self._engine, ref)
                api.start(ref.handle)
                pid = api.inspect_container(ref.handle)["State"]["Pid"]
            if bridge == docker_bridge.NAMESPACE:
                _try_entering(pid, ref.handle)
            elif bridge == docker_bridge.RELAY and proxy and proxy.socket:
                sandbox.start_relay(proxy.socket)
            if user and user.split(":")[0] not in ("0", "root"):
                sandbox = self._as_user(sandbox, own_workdir=options.user is not None, deadline=deadline)
            _left(deadline)
            return sandbox
        except EngineNotFound as e:
            sandbox.destroy()
            raise InfraError(f"Docker engine: {e.explanation or e}", code="runtime_create_failed") from e
        except InfraError as e:
            sandbox.destroy()
            if e.code == "exec_failed":
                raise InfraError(e.message, code="runtime_create_failed", retryable=e.retryable) from e
            raise
        except BaseException:
            sandbox.destroy()
            raise

    def _config(
        self,
        api: Any,
        spec: RuntimeSpec,
        ref: SandboxRef,
        labels: dict[str, str],
        proxy: ProxyEndpoint | None,
        bridge: str | None,
    ) -> dict[str, Any]:
        mounts = [Mount(v.target, v.source, type="bind", read_only=True) for v in spec.volumes]
        if bridge == docker_bridge.RELAY and proxy and proxy.socket:
            # The folder, not the socket: a proxy that starts anew makes a new socket.
            folder = os.path.dirname(os.path.abspath(proxy.socket))
            mounts.append(Mount(docker_bridge.MOUNT, folder, type="bind", read_only=True))
        memory = (spec.memory_mb or DEFAULT_MEMORY_MB) << 20
        host = api.create_host_config(
            init=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            network_mode="bridge" if spec.network == "internet" else "none",
            ipc_mode="private",
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=spec.pids or DEFAULT_PIDS,
            nano_cpus=int(spec.cpus * 1e9) if spec.cpus else None,
            device_requests=[DeviceRequest(count=spec.gpus, capabilities=[["gpu"]])] if spec.gpus else None,
            ulimits=[Ulimit(name="core", soft=0, hard=0)],
            oom_score_adj=500,  # before the worker
            mounts=mounts,
            log_config={"type": "none", "config": {}},
        )
        return api.create_container_config(
            spec.image,
            # Root's process, without capabilities: an agent that isn't root can't end it.
            ["infinity"],
            entrypoint=["sleep"],
            user="0:0",
            working_dir=ref.workdir,
            environment=spec.env,
            labels={**labels, LABEL_REF: to_json(ref).decode()},
            host_config=host,
            healthcheck={"test": ["NONE"]},
        )

    def _as_user(self, sandbox: DockerSandbox, *, own_workdir: bool, deadline: float) -> DockerSandbox:
        """Who the user is, by the image's own word; the working directory becomes theirs if the task chose them."""
        done = sandbox.exec(
            ["sh", "-c", 'id -u; id -g; printf "%s\\n" "$HOME"'], cwd="/", timeout=min(30.0, _left(deadline))
        )
        lines = done.output.decode("utf-8", "replace").splitlines()
        if done.exit_code != 0 or len(lines) != 3 or not (lines[0] + lines[1]).isdigit():
            text = done.output.decode("utf-8", "replace").strip()[-200:]
            raise InfraError(
                f"user '{sandbox.ref.state['user']}' in the image: {text}",
                code="runtime_create_failed",
                retryable=False,
            )
        ref = replace(
            sandbox.ref, state={**sandbox.ref.state, "uid": lines[0], "gid": lines[1], "home": lines[2] or "/"}
        )
        made = DockerSandbox(self._engine, ref)
        if own_workdir:
            made.give(ref.workdir)
        return made

    def _image(self, spec: RuntimeSpec, options: Options, deadline: float) -> dict[str, Any]:
        assert spec.image
        try:
            with self._engine.call(timeout=_left(deadline), code="runtime_create_failed") as api:
                return api.inspect_image(spec.image)
        except ImageNotFound as e:
            if not options.pull:
                raise InfraError(
                    f"image '{spec.image}' is not on this node (options.pull would fetch it)",
                    code="image_missing",
                    retryable=False,
                ) from e
        with self._pulls.setdefault(spec.image, threading.Lock()):
            try:
                with self._engine.call(timeout=_left(deadline), code="runtime_create_failed") as api:
                    for event in api.pull(spec.image, stream=True, decode=True):
                        _left(deadline)
                        if "error" in event:
                            raise InfraError(
                                f"image '{spec.image}': {event['error']}", code="image_missing", retryable=False
                            )
                    return api.inspect_image(spec.image)
            except EngineNotFound as e:
                raise InfraError(f"image '{spec.image}': {e}", code="image_missing", retryable=False) from e

    # -- finding them again

    def attach(self, ref: SandboxRef) -> DockerSandbox:
        return DockerSandbox(self._engine, ref)

    def list(self, labels: dict[str, str]) -> list[SandboxRef]:
        wanted = [LABEL_REF, *(f"{k}={v}" for k, v in labels.items())]
        with self._engine.call(code="runtime_create_failed") as api:
            found = api.containers(all=True, filters={"label": wanted})
        return [replace(from_json(c["Labels"][LABEL_REF], SandboxRef, LABEL_REF), handle=c["Id"]) for c in found]


class _CantEnter(Exception):
    pass


def _try_entering(pid: int, container: str) -> None:
    if not netns.is_container(pid, container):
        raise _CantEnter("its processes can't be seen")
    try:
        netns.listen(pid, 0).close()
    except OSError as e:
        raise _CantEnter(str(e)) from e


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise InfraError("no time left to create the sandbox", code="runtime_create_failed")
    return left
