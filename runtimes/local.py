"""The `local` runtime: a folder per sandbox on this host, its commands inside bubblewrap where that works.

Without bubblewrap (`isolation: none`, or `auto` on a machine that has none) commands run as ordinary processes of this
host: UNSANDBOXED. Nothing but their clean-up is promised then.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct, field

from polar.config import Settings
from polar.errors import InfraError, PolarError, UnsupportedSpec
from polar.ids import is_id, new_id
from polar.sandbox import ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec
from runtimes import bwrap, cgroups, forward, records, seccomp
from runtimes.holder import Impossible
from runtimes.local_box import Record, mount_points
from runtimes.local_cow import support
from runtimes.local_sandbox import LocalSandbox
from runtimes.options import check_volumes, read_options, refuse

log = logging.getLogger("polar.local")

DEFAULT_PIDS = 512  # where there are control groups
Isolation = Literal["auto", "bwrap", "none"]
RootKind = Literal["auto", "overlay", "read-only"]
Count = Annotated[int, Meta(ge=1)]


class Rlimits(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Limits of each single process, not of the sandbox: a guard against accidents."""

    address_space_mb: Count | None = None
    file_size_mb: Count | None = None
    open_files: Count | None = None
    cpu_seconds: Count | None = None


class Options(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`seccomp` false leaves the system call filter out (bubblewrap only). `root`: `overlay` is copy-on-write or an error,
    `auto` falls back to `read-only` where this machine can't do it."""

    isolation: Isolation = "auto"
    root: RootKind = "auto"
    seccomp: bool = True
    rlimits: Rlimits = field(default_factory=Rlimits)


class LocalRuntime:
    name = "local"

    def __init__(self, settings: Settings):
        self.data_dir = Path(settings.data_dir).resolve()
        self.root = self.data_dir / "sandboxes"
        self._overlay = support(self.data_dir)

    def check(self, spec: RuntimeSpec) -> None:
        self._options(spec)

    def _options(self, spec: RuntimeSpec) -> Options:
        options = read_options(spec, Options, self.name)
        refuse(spec, self.name, image="local sandboxes have no images", gpus="it sees no devices")
        groups = cgroups.find()
        if isinstance(groups, str):
            refuse(
                spec,
                self.name,
                cpus=groups,
                memory_mb=f"{groups}; options.rlimits.address_space_mb bounds each single process",
                pids=groups,
            )
        _user(spec)
        check_volumes(spec, str(self.data_dir))
        if options.isolation == "none":
            _check_plain(spec, "with isolation 'none'")
            if options.root != "auto":
                raise UnsupportedSpec(f"runtime.options.root: isolation 'none' has no '{options.root}' root")
        else:
            mount_points(spec, cow=options.root == "overlay")
        return options

    def available(self) -> tuple[bool, str]:
        found = bwrap.find()
        if isinstance(found, str):
            return True, f"UNSANDBOXED processes (no bubblewrap: {found})"
        groups = cgroups.find()
        limits = f"no limits: {groups}" if isinstance(groups, str) else f"cgroups v{groups.version}"
        filtered = "" if seccomp.supported() else ", no system call filter on this machine's architecture"
        why = self._overlay.missing()
        root = f"system folders read-only: {why}" if why else "copy-on-write root"
        return True, f"bubblewrap {found.version} ({limits}{filtered}; {root})"

    def create(
        self, spec: RuntimeSpec, *, labels: dict[str, str], proxy: ProxyEndpoint | None, timeout: float
    ) -> LocalSandbox:
        options = self._options(spec)
        boxed = self._boxed(spec, options)
        cow = boxed and options.root != "read-only" and not (options.root == "auto" and self._overlay.known_missing)
        try:
            return self._made(spec, options, labels, proxy, boxed=boxed, cow=cow)
        except Impossible as e:
            self._overlay.is_missing(str(e))
            if options.root == "overlay":
                raise InfraError(
                    f"runtime.options.root: no copy-on-write root on this machine: {e}",
                    code="runtime_create_failed",
                    retryable=False,
                ) from e
        return self._made(spec, options, labels, proxy, boxed=boxed, cow=False)

    def _made(
        self,
        spec: RuntimeSpec,
        options: Options,
        labels: dict[str, str],
        proxy: ProxyEndpoint | None,
        *,
        boxed: bool,
        cow: bool,
    ) -> LocalSandbox:
        """Nothing is left of one that fails. Raises Impossible, InfraError."""
        sandbox_id = new_id("sandbox")
        folder = self.root / sandbox_id
        record = self._record(spec, options, sandbox_id, labels, proxy, boxed=boxed, cow=cow)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            os.chmod(self.root, 0o700)
            # The record comes first: whatever exists of a sandbox can be found by its labels.
            records.save(self.record_path(sandbox_id), record)
            sandbox = LocalSandbox(self, record)
            sandbox.make()
            return sandbox
        except (OSError, InfraError, Impossible) as e:
            try:
                LocalSandbox(self, record).destroy()
            except PolarError as left:
                log.warning("half-made sandbox %s: %s", folder, left)
            if isinstance(e, Impossible):
                raise
            raise InfraError(f"can't make a sandbox in '{folder}': {e}", code="runtime_create_failed") from e

    def _boxed(self, spec: RuntimeSpec, options: Options) -> bool:
        if options.isolation == "none":
            return False
        found = bwrap.find()
        if isinstance(found, bwrap.Bwrap):
            return True
        if options.isolation == "bwrap":
            raise InfraError(
                f"bubblewrap doesn't work on this machine: {found}", code="runtime_create_failed", retryable=False
            )
        _check_plain(spec, "on a machine without bubblewrap")
        return False

    def _record(
        self,
        spec: RuntimeSpec,
        options: Options,
        sandbox_id: str,
        labels: dict[str, str],
        proxy: ProxyEndpoint | None,
        *,
        boxed: bool,
        cow: bool,
    ) -> Record:
        files = str(self.root / sandbox_id / "fs")
        proxied = proxy if spec.network != "none" else None
        bridged = boxed and spec.network == "proxy-only" and proxied is not None
        ref = SandboxRef(
            backend=self.name,
            handle=sandbox_id,
            proxy_url="" if proxied is None else forward.INSIDE_URL if bridged else proxied.url.rstrip("/"),
            workdir=(spec.workdir or "/work") if boxed else f"{files}/work",
            labels=dict(labels),
            state={
                "home": bwrap.HOME if boxed else files + bwrap.HOME,
                "isolation": "bwrap" if boxed else "none",
                **({"root": "overlay" if cow else "read-only"} if boxed else {}),
            },
        )
        if not boxed:
            log.warning("sandbox %s is UNSANDBOXED: its commands run as ordinary processes of this host", sandbox_id)
        groups = isinstance(cgroups.find(), cgroups.Cgroups)
        rlimits = {k: v for k, v in msgspec.to_builtins(options.rlimits).items() if v is not None}
        wished = {"open_files": spec.open_files, "file_size_mb": spec.disk_mb}
        rlimits |= {k: v for k, v in wished.items() if v is not None and k not in rlimits}
        return Record(
            ref=ref,
            env=spec.env,
            network=spec.network,
            proxy=proxied if bridged else None,
            volumes=spec.volumes,
            mounts=list(mount_points(spec, cow=cow)) if boxed else [],
            rlimits=rlimits,
            filtered=options.seccomp,
            user=_user(spec),
            grouped=groups,
            cpus=spec.cpus,
            memory=spec.memory_mb << 20 if spec.memory_mb else None,
            pids=spec.pids or DEFAULT_PIDS,
            disk=spec.disk_mb << 20 if spec.disk_mb else None,
        )

    def attach(self, ref: SandboxRef) -> LocalSandbox:
        return LocalSandbox(self, records.load(self.record_path(ref.handle), Record) or Record(ref=ref))

    def list(self, labels: dict[str, str]) -> list[SandboxRef]:
        return [r.ref for r in records.every(self.root, Record) if labels.items() <= r.ref.labels.items()]

    def record_path(self, sandbox_id: str) -> Path:
        if not is_id(sandbox_id):
            raise InfraError(f"'{sandbox_id}' is no handle of a local sandbox", code="exec_failed", retryable=False)
        return self.root / f"{sandbox_id}.json"


def _check_plain(spec: RuntimeSpec, when: str) -> None:
    """What ordinary processes can't be given. Their network is the host's: `proxy-only`, the default, is passed over
    with a warning, but who asks for `none` must get it."""
    if spec.network == "none":
        raise UnsupportedSpec(f"runtime.network: the 'local' runtime can't keep 'none' {when}")
    if spec.user:
        raise UnsupportedSpec(f"runtime.user: the 'local' runtime can't be '{spec.user}' {when}")
    if spec.workdir:
        raise UnsupportedSpec(f"runtime.workdir: the 'local' runtime can't place it at '{spec.workdir}' {when}")
    for i, v in enumerate(spec.volumes):
        raise UnsupportedSpec(f"runtime.volumes[{i}]: the 'local' runtime can't mount '{v.source}' {when}")


def _user(spec: RuntimeSpec) -> list[int]:
    """uid and gid inside; empty without a wish."""
    if spec.user is None:
        return []
    name = {"root": "0:0"}.get(spec.user, spec.user)
    uid, _, gid = name.partition(":")
    if not all(n.isdecimal() and int(n) < 1 << 31 for n in (uid, gid or uid)):
        raise UnsupportedSpec(f"runtime.user: the 'local' runtime knows 'root', 'uid' and 'uid:gid', not '{spec.user}'")
    return [int(uid), int(gid or uid)]
