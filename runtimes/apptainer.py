"""The `apptainer` runtime: a rootless Apptainer instance per sandbox, for machines where Docker is not allowed.

Defaults where the spec says nothing: 512 processes; memory and processors are bounded only where the machine lets this
user have control groups. Commands join the instance's namespaces through `runtimes.enter` instead of `apptainer exec`: that
takes a third of the time, adds nothing to their environment, and puts the system call filter on.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import posixpath
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from msgspec import Struct

from polar.config import Settings
from polar.errors import InfraError, PolarError, UnsupportedSpec
from polar.ids import is_id, new_id
from polar.sandbox import ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec
from runtimes import apptainer_cli, apptainer_layer, apptainer_source, cgroups, forward, records, seccomp
from runtimes.apptainer_cli import Cli, left
from runtimes.apptainer_images import Image, Images
from runtimes.apptainer_sandbox import ApptainerSandbox, Record
from runtimes.options import check_volumes, read_options

log = logging.getLogger("polar.apptainer")

SHELF_VARIABLE = "POLAR_APPTAINER_IMAGES"
PARALLEL_VARIABLE = "POLAR_APPTAINER_PARALLEL"
DISK_VARIABLE = "POLAR_APPTAINER_DISK"
PARALLEL = 8  # instances that one process starts at once
DEFAULT_PIDS = 512
DEFAULT_WORKDIR = "/work"
DEFAULT_HOME = "/root"
_ROOT_NAMES = ("root", "0", "0:0")
_KINDS: dict[str, apptainer_layer.Kind] = {"watched": "folder", "file": "file", "memory": "memory"}


class Options(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`pull`: what may be fetched from a registry; by default "missing" for an image named with its registry's scheme
    (`docker://…`), and nothing for a bare name. `seccomp` false leaves the system call filter out. `disk`: how `disk_mb` is
    kept; "auto" is what the node says, or "file" where the worker can mount, or else "watched"."""

    pull: Literal["missing", "always", "never"] | None = None
    seccomp: bool = True
    disk: Literal["auto", "watched", "file", "memory"] = "auto"


class ApptainerRuntime:
    name = "apptainer"

    def __init__(self, settings: Settings):
        self._data_dir = Path(settings.data_dir).resolve()
        self.root = self._data_dir / "apptainer"
        self.records, self.boxes, self.clean = self.root / "records", self.root / "boxes", self.root / "clean"
        self.disks = self.root / "disks"
        self._shelf = Path(os.environ.get(SHELF_VARIABLE) or self.root / "shelf").resolve()
        self._roots = list(settings.volume_roots)
        self.images = Images(self.root / "cache", lambda: {r.image_key for r in self._all()})
        self._slots = threading.BoundedSemaphore(int(os.environ.get(PARALLEL_VARIABLE) or PARALLEL))

    # -- what can be asked for

    def check(self, spec: RuntimeSpec) -> None:
        options = read_options(spec, Options, self.name)
        check_volumes(spec, str(self._data_dir))
        if not spec.image:
            raise UnsupportedSpec("runtime.image: the 'apptainer' runtime needs one")
        apptainer_source.parse(spec.image, self._shelf, self._roots)
        if spec.user not in (None, *_ROOT_NAMES):
            raise UnsupportedSpec(
                f"runtime.user: the 'apptainer' runtime can be the node's own user (leave it out) or 'root', not '{spec.user}'"
            )
        if options.disk in ("file", "memory") and not spec.disk_mb:
            raise UnsupportedSpec(f"runtime.options.disk: '{options.disk}' needs a size: runtime.disk_mb")
        if options.disk == "memory" and spec.user is not None:
            raise UnsupportedSpec(
                "runtime.options.disk: 'memory' can't be had as user 'root', only as the node's own user"
            )
        if spec.workdir and posixpath.normpath(spec.workdir) != spec.workdir:
            raise UnsupportedSpec(f"runtime.workdir: '{spec.workdir}' is not a plain absolute path")
        for i, v in enumerate(spec.volumes):
            if any(c in v.source + v.target for c in ',"\\\n'):
                raise UnsupportedSpec(f"runtime.volumes[{i}]: Apptainer can't be told a path with a comma or a quote")
            if v.target.startswith("/.singularity.d"):
                raise UnsupportedSpec(f"runtime.volumes[{i}].target: '{v.target}' is Apptainer's own")
        # Only where this machine could run it is it known what it can't keep; elsewhere the node says so.
        if isinstance(apptainer_cli.find(), Cli):
            self._check_here(spec, options)

    def _check_here(self, spec: RuntimeSpec, options: Options) -> None:
        groups = cgroups.find()
        for name in ("cpus", "memory_mb"):
            if getattr(spec, name) and isinstance(groups, str):
                raise UnsupportedSpec(f"runtime.{name}: the 'apptainer' runtime can't keep it on this node: {groups}")
        if _layer(spec, options) == "file" and (why := apptainer_layer.no_files()):
            raise UnsupportedSpec(f"runtime.options.disk: 'file' can't be had on this node: {why}")

    def available(self) -> tuple[bool, str]:
        found = apptainer_cli.find()
        if isinstance(found, str):
            return False, found
        groups = cgroups.find()
        limits = f"no limits on memory and cpus: {groups}" if isinstance(groups, str) else f"cgroups v{groups.version}"
        filtered = "" if seccomp.supported() else ", no system call filter on this machine's architecture"
        told = {"folder": "watched", "file": "enforced", "memory": "enforced, in memory"}
        disk = f"disk_mb {told[_layer(RuntimeSpec(disk_mb=1), Options())]}"
        return True, f"Apptainer {found.version} ({limits}, {disk}{filtered})"

    # -- making one

    def create(
        self, spec: RuntimeSpec, *, labels: dict[str, str], proxy: ProxyEndpoint | None, timeout: float
    ) -> ApptainerSandbox:
        self.check(spec)
        deadline = time.monotonic() + timeout
        options = read_options(spec, Options, self.name)
        cli = apptainer_cli.need()
        self._check_here(spec, options)
        assert spec.image
        sandbox: ApptainerSandbox | None = None
        try:
            self._prepare(cli)
            source = apptainer_source.parse(spec.image, self._shelf, self._roots)
            pull = options.pull or ("missing" if "://" in spec.image else "never")
            image = self.images.get(cli, source, pull, deadline)
            for v in spec.volumes:
                if not os.path.exists(v.source):
                    raise FileNotFoundError(2, "no such volume source", v.source)
            with self.images.pinned():
                if image.key and not os.path.isdir(image.rootfs):
                    raise FileNotFoundError(2, "the image was removed from the cache meanwhile", image.rootfs)
                record = self._record(spec, options, image, labels, proxy)
                # The record comes first: whatever exists of a sandbox can be found by its labels.
                records.save(self.record_path(record.ref.handle), record)
            sandbox = ApptainerSandbox(self, record)
            with self._slot(deadline):
                sandbox.make(deadline)
            return sandbox
        except BaseException as e:
            if sandbox is not None:
                self._undo(sandbox)
            if isinstance(e, OSError):
                raise InfraError(f"can't make a sandbox: {e}", code="runtime_create_failed") from e
            if isinstance(e, InfraError) and e.code not in ("image_missing", "runtime_create_failed"):
                raise InfraError(e.message, code="runtime_create_failed", retryable=e.retryable) from e
            raise

    def _undo(self, sandbox: ApptainerSandbox) -> None:
        try:
            sandbox.destroy()
        except PolarError as e:
            log.warning("half-made sandbox %s: %s", sandbox.ref.handle, e)

    def _prepare(self, cli: Cli) -> None:
        """Folders. Those of the containers belong to their owner, who must be able to get there."""
        for folder in (self.root, self.root / "cache", self.records, self.boxes, self.clean, self.clean / "env"):
            folder.mkdir(parents=True, exist_ok=True)
        self.records.chmod(0o700)
        self.disks.mkdir(mode=0o711, exist_ok=True)  # the owner may get to its own, and change nothing on the way
        cli.give(self.boxes)
        start = self.clean / "startscript"
        if not start.exists():
            temp = self.clean / f".{os.getpid()}-{threading.get_ident()}"
            temp.write_text("#!/bin/sh\n")
            temp.chmod(0o755)
            os.replace(temp, start)
        self.images.prepare(cli)
        if cli.owner is not None and (wall := _wall(self.boxes, cli.owner)):
            raise InfraError(
                f"user {cli.owner[0]}, whose containers are made, can't get into '{wall}' (data_dir lies below it)",
                code="runtime_create_failed",
                retryable=False,
            )

    def _record(
        self, spec: RuntimeSpec, options: Options, image: Image, labels: dict[str, str], proxy: ProxyEndpoint | None
    ) -> Record:
        proxied = proxy if spec.network != "none" else None
        bridged = spec.network == "proxy-only" and proxied is not None
        home = spec.env.get("HOME") or DEFAULT_HOME
        ref = SandboxRef(
            backend=self.name,
            handle=new_id("sandbox"),
            proxy_url="" if proxied is None else forward.INSIDE_URL if bridged else proxied.url.rstrip("/"),
            workdir="/" + (spec.workdir or image.workdir or DEFAULT_WORKDIR).strip("/"),
            labels=dict(labels),
            state={"home": home},
        )
        return Record(
            ref=ref,
            rootfs=image.rootfs,
            image_key=image.key,
            env={**image.env, "HOME": home, **spec.env},
            network=spec.network,
            proxy=proxied if bridged else None,
            volumes=spec.volumes,
            gpus=spec.gpus > 0,
            root=spec.user in _ROOT_NAMES,
            filtered=options.seccomp,
            cpus=spec.cpus,
            memory=spec.memory_mb << 20 if spec.memory_mb else None,
            pids=spec.pids or DEFAULT_PIDS,
            disk=spec.disk_mb << 20 if spec.disk_mb else None,
            layer=_layer(spec, options),
            open_files=spec.open_files,
        )

    @contextlib.contextmanager
    def _slot(self, deadline: float) -> Iterator[None]:
        if not self._slots.acquire(timeout=left(deadline)):
            raise InfraError("this process starts too many sandboxes at once", code="runtime_create_failed")
        try:
            yield
        finally:
            self._slots.release()

    # -- finding them again

    def _all(self) -> list[Record]:
        return records.every(self.records, Record)

    def attach(self, ref: SandboxRef) -> ApptainerSandbox:
        return ApptainerSandbox(self, records.load(self.record_path(ref.handle), Record) or Record(ref=ref))

    def record_path(self, handle: str) -> Path:
        if not is_id(handle):
            raise InfraError(f"'{handle}' is no handle of an Apptainer sandbox", code="exec_failed", retryable=False)
        return self.records / f"{handle}.json"

    @contextlib.contextmanager
    def locked(self, handle: str) -> Iterator[None]:
        """One starts, stops or removes a sandbox at a time, in whatever process."""
        with open(os.open(self.records / f"{handle}.lock", os.O_RDWR | os.O_CREAT, 0o600), "w") as f:
            fcntl.flock(f, fcntl.LOCK_EX)
            yield

    def list(self, labels: dict[str, str]) -> list[SandboxRef]:
        return [r.ref for r in self._all() if labels.items() <= r.ref.labels.items()]


def _layer(spec: RuntimeSpec, options: Options) -> apptainer_layer.Kind:
    if options.disk != "auto":
        return _KINDS[options.disk]
    if not spec.disk_mb:
        return "folder"
    if node := os.environ.get(DISK_VARIABLE):
        if node not in _KINDS:
            raise UnsupportedSpec(f"{DISK_VARIABLE}: '{node}' is none of {', '.join(_KINDS)}")
        return "folder" if node == "memory" and spec.user is not None else _KINDS[node]
    return "folder" if apptainer_layer.no_files() else "file"


def _wall(folder: Path, owner: tuple[int, int]) -> str:
    """The first folder on the way to `folder` that `owner` may not pass."""
    for path in (*reversed(folder.parents), folder):
        info = path.stat()
        bit = 0o100 if info.st_uid == owner[0] else 0o010 if info.st_gid == owner[1] else 0o001
        if not info.st_mode & bit:
            return str(path)
    return ""
