"""Strict reading of `runtime.options`, and the checks that back-ends share."""

from __future__ import annotations

import posixpath
from typing import Any, TypeVar

from msgspec import structs

from polar.codec import convert
from polar.errors import InvalidTask, UnsupportedSpec
from polar.task import RuntimeSpec

T = TypeVar("T")

# Host folders that are the machine itself, or hold the sockets that rule it. Read-only doesn't make a socket harmless.
FORBIDDEN_SOURCES = ("/", "/proc", "/sys", "/dev", "/run", "/var/run", "/var/lib/docker", "/boot")


def read_options(spec: RuntimeSpec, typ: type[T], backend: str) -> T:
    """`spec.options` as `typ`, a struct that forbids unknown fields."""
    allowed = [f.encode_name for f in structs.fields(typ)]  # type: ignore[arg-type]
    for key in spec.options:
        if key not in allowed:
            raise UnsupportedSpec(
                f"runtime.options.{key}: unknown to the '{backend}' runtime; allowed: {', '.join(allowed)}"
            )
    try:
        return convert(spec.options, typ, "runtime.options")
    except InvalidTask as e:
        raise UnsupportedSpec(e.message) from e


def check_volumes(spec: RuntimeSpec, private: str) -> None:
    """Refuse mounts of the machine's own folders and of Polar's data folder `private`."""
    for i, volume in enumerate(spec.volumes):
        where = f"runtime.volumes[{i}]"
        for name, path in (("source", volume.source), ("target", volume.target)):
            if not path.startswith("/") or posixpath.normpath(path) != path.rstrip("/") or ":" in path:
                raise UnsupportedSpec(f"{where}.{name}: '{path}' is not a plain absolute path")
        if volume.target.rstrip("/") in ("", "/proc", "/sys", "/dev"):
            raise UnsupportedSpec(f"{where}.target: nothing can be mounted at '{volume.target}'")
        for bad in FORBIDDEN_SOURCES:
            if volume.source.rstrip("/") == bad.rstrip("/") or (bad != "/" and _inside(volume.source, bad)):
                raise UnsupportedSpec(f"{where}.source: '{volume.source}' is never mounted into a sandbox")
        if _inside(volume.source, private) or _inside(private, volume.source):
            raise UnsupportedSpec(f"{where}.source: '{volume.source}' holds this deployment's own data")


def refuse(spec: RuntimeSpec, backend: str, **fields: Any) -> None:
    """Raise for each named field that is set; the value says why it can't be kept."""
    for name, why in fields.items():
        if getattr(spec, name):
            raise UnsupportedSpec(f"runtime.{name}: the '{backend}' runtime can't keep it: {why}")


def _inside(path: str, folder: str) -> bool:
    return path.rstrip("/") == folder.rstrip("/") or path.startswith(folder.rstrip("/") + "/")
