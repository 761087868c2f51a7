"""The `docker` runtime: a container per sandbox, without capabilities, and by default without a network.

Defaults where the spec says nothing: 4 GiB of memory (no swap), 512 processes. Images are looked for on the engine only,
unless `options.pull` allows to fetch a missing one.
"""

from __future__ import annotations

import logging
import os
import posixpath
import time
from pathlib import Path
from typing import Any, Literal

from docker.errors import APIError, ImageNotFound
from docker.errors import NotFound as EngineNotFound
from msgspec import Struct
from msgspec.structs import replace

from polar.codec import from_json
from polar.config import Settings
from polar.errors import InfraError, PolarError, UnsupportedSpec
from polar.ids import new_id
from polar.sandbox import ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec
from runtimes import docker_bridge, docker_config, docker_podman, docker_prepared, docker_pull, netns
from runtimes.docker_config import LABEL_REF
from runtimes.docker_engine import Engine, translated
from runtimes.docker_sandbox import DockerSandbox
from runtimes.forward import INSIDE_URL
from runtimes.options import check_volumes, read_options

log = logging.getLogger("polar.docker")

DEFAULT_WORKDIR = "/work"
PROBE_TIMEOUT = 5.0


class Options(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`user` is an older place of `runtime.user`. `pull`: false is "never", true is "missing".
    `cache_prepare`: see `runtimes.docker_prepared`."""

    user: str | None = None
    pull: bool | Literal["missing", "always", "never"] = "never"
    cache_prepare: bool = False

    @property
    def policy(self) -> str:
        return self.pull if isinstance(self.pull, str) else "missing" if self.pull else "never"


class DockerRuntime:
    name = "docker"

    def __init__(self, settings: Settings):
        self._data_dir = str(Path(settings.data_dir).resolve())
        self._engine = Engine()
        self._enters: bool | None = None  # can containers' namespaces be entered? None: not tried yet
        self._system_calls: str | None = None  # a filter other than the engine's own
        self._quota: bool | None = None  # does the engine keep disk quotas? None: not tried yet

    def check(self, spec: RuntimeSpec) -> None:
        options = read_options(spec, Options, self.name)
        check_volumes(spec, self._data_dir)
        if spec.user and options.user and spec.user != options.user:
            raise UnsupportedSpec(f"runtime.options.user: '{options.user}' contradicts runtime.user: '{spec.user}'")
        if not spec.image:
            raise UnsupportedSpec("runtime.image: the 'docker' runtime needs one")
        if spec.workdir and posixpath.normpath(spec.workdir) != spec.workdir:
            raise UnsupportedSpec(f"runtime.workdir: '{spec.workdir}' is not a plain absolute path")

    def available(self) -> tuple[bool, str]:
        try:
            with self._engine.call(timeout=PROBE_TIMEOUT, code="runtime_create_failed") as api:
                version = api.version().get("Version", "?")
            name = "Podman" if self._engine.is_podman() else "Docker"
            missing = self._engine.unlimited()
            return True, f"{name} {version}" + (f", no limits on {', '.join(missing)}" if missing else "")
        except PolarError as e:
            return False, e.message

    # -- making one

    def create(
        self, spec: RuntimeSpec, *, labels: dict[str, str], proxy: ProxyEndpoint | None, timeout: float
    ) -> DockerSandbox:
        self.check(spec)
        deadline = time.monotonic() + timeout
        options = read_options(spec, Options, self.name)
        self._check_limits(spec)
        image = self._image(spec, options, deadline)
        more: dict[str, str] = {}
        if options.cache_prepare and (steps := docker_prepared.steps_of(spec, labels)):
            tag = docker_prepared.key(image["Id"], spec, steps)
            more = {"steps": docker_prepared.name_of(steps), "tag": tag}
            if docker_prepared.find(self._engine, tag):
                more["prepared"] = "1"
                spec = replace(spec, image=f"{docker_prepared.REPOSITORY}:{tag}")
        proxy = proxy if spec.network != "none" else None
        while True:
            bridge = self._bridge(proxy)
            try:
                return self._create(spec, options, image, labels, proxy, bridge, deadline, more)
            except _CantEnter as e:
                log.info("containers' networks can't be entered from here (%s): the proxy comes in by a relay", e)
                self._enters = False

    def _check_limits(self, spec: RuntimeSpec) -> None:
        for name in self._engine.unlimited():
            if getattr(spec, name) is not None:
                raise UnsupportedSpec(
                    f"runtime.{name}: this engine takes it and does nothing (a rootless one needs control groups of version 2 and "
                    "their delegation)"
                )

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
        more: dict[str, str],
    ) -> DockerSandbox:
        config = image.get("Config") or {}
        wished = spec.user or options.user
        user = wished if wished is not None else config.get("User") or ""
        home = spec.env.get("HOME") or "/root"
        workdir = spec.workdir or config.get("WorkingDir") or DEFAULT_WORKDIR
        state = {"home": home, "user": user, **more}
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
            system_calls = self._filter()
            with self._engine.call(timeout=_left(deadline), code="runtime_create_failed") as api:
                asked = docker_config.container(api, spec, ref, labels, proxy, bridge, system_calls)
                made = self._made(api, spec, ref, asked)
                ref = replace(ref, handle=made["Id"])
                sandbox = DockerSandbox(self._engine, ref)
                api.start(ref.handle)
                told = api.inspect_container(ref.handle)
                pid = told["State"]["Pid"]
            if spec.disk_mb and not self._quota:
                ref = self._watched(ref, spec.disk_mb, told)
                sandbox = DockerSandbox(self._engine, ref)
            if bridge == docker_bridge.NAMESPACE:
                _try_entering(pid, ref.handle)
            elif bridge == docker_bridge.RELAY and proxy and proxy.socket:
                sandbox.start_relay(proxy.socket)
            if user and user.split(":")[0] not in ("0", "root"):
                sandbox = self._as_user(sandbox, own_workdir=wished is not None, deadline=deadline)
            _left(deadline)
            return sandbox
        except EngineNotFound as e:
            _undo(sandbox)
            raise InfraError(f"Docker engine: {e.explanation or e}", code="runtime_create_failed") from e
        except InfraError as e:
            _undo(sandbox)
            if e.code == "exec_failed":
                raise InfraError(e.message, code="runtime_create_failed", retryable=e.retryable) from e
            raise
        except BaseException:
            _undo(sandbox)
            raise

    def _filter(self) -> str | None:
        if self._system_calls is None and self._engine.is_podman():
            own = self._engine.podman_host()["security"].get("seccompProfilePath") or ""
            if self._engine.is_local():
                self._system_calls = docker_podman.filter_file(own, Path(self._data_dir, "docker"))
            if self._system_calls is None:
                log.warning(
                    "Podman's system call filter '%s' can't be narrowed: nested user namespaces are possible", own
                )
        return self._system_calls

    def _made(self, api: Any, spec: RuntimeSpec, ref: SandboxRef, config: dict[str, Any]) -> dict[str, Any]:
        """With a quota on its files where the engine's storage can keep one."""
        if spec.disk_mb and self._quota is not False:
            try:
                limited = {**config, "HostConfig": {**config["HostConfig"], "StorageOpt": {"size": f"{spec.disk_mb}m"}}}
                made = api.create_container_from_config(limited, ref.handle)
                self._quota = True
                return made
            except APIError as e:
                if "storage" not in str(e.explanation).lower():
                    raise
                log.info("no disk quotas on this engine (%s): what sandboxes write is watched", e.explanation)
                self._quota = False
        return api.create_container_from_config(config, ref.handle)

    def _watched(self, ref: SandboxRef, disk_mb: int, told: dict[str, Any]) -> SandboxRef:
        upper = ((told.get("GraphDriver") or {}).get("Data") or {}).get("UpperDir") or ""
        if not (upper and self._engine.is_local() and os.access(upper, os.R_OK)):
            raise UnsupportedSpec(
                "runtime.disk_mb: this Docker engine's storage has no quotas (overlay2 on xfs with pquota has), and the "
                "sandbox's files can't be measured from here"
            )
        return replace(ref, state={**ref.state, "upper": upper, "disk": str(disk_mb << 20)})

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
        if options.policy != "always":
            try:
                with self._engine.call(timeout=_left(deadline), code="runtime_create_failed") as api:
                    return api.inspect_image(spec.image)
            except ImageNotFound as e:
                if options.policy == "never":
                    raise InfraError(
                        f"image '{spec.image}' is not on this node (options.pull would fetch it)",
                        code="image_missing",
                        retryable=False,
                    ) from e
        return docker_pull.pull(self._engine, spec.image, lambda: _left(deadline))

    # -- finding them again

    def attach(self, ref: SandboxRef) -> DockerSandbox:
        return DockerSandbox(self._engine, ref)

    def list(self, labels: dict[str, str]) -> list[SandboxRef]:
        wanted = [LABEL_REF, *(f"{k}={v}" for k, v in labels.items())]
        with self._engine.call(code="runtime_create_failed") as api:
            found = api.containers(all=True, filters={"label": wanted})
        return [replace(from_json(c["Labels"][LABEL_REF], SandboxRef, LABEL_REF), handle=c["Id"]) for c in found]


def _undo(sandbox: DockerSandbox) -> None:
    """The first error is the one to tell. What is left carries its labels, for the janitor."""
    try:
        sandbox.destroy()
    except PolarError as e:
        log.warning("half-made container %s: %s", sandbox.ref.handle[:12], e)


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
