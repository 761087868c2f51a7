"""Strict evaluator config: an unknown key is refused where it was written, not found out when the tests run."""

from __future__ import annotations

import posixpath
from typing import Any, TypeVar

from msgspec import Struct

from polar.codec import convert
from polar.errors import InvalidTask

T = TypeVar("T", bound=Struct)
WHERE = "evaluator.config"


def read(config: dict[str, Any], typ: type[T], name: str) -> T:
    """`config` as a struct. Raises InvalidTask naming the key, what was found, and what is allowed."""
    allowed = typ.__struct_fields__
    for key in config:
        if key not in allowed:
            what = f"allowed: {', '.join(allowed)}" if allowed else "it takes none"
            raise InvalidTask(f"{WHERE}.{key}: unknown key for '{name}'; {what}")
    return convert(config, typ, WHERE)


def check_path(path: str, field: str, *, folder: bool = False) -> str:
    """A sandbox path, absolute or relative to the working directory. Raises InvalidTask unless it stays where it says."""
    normal = posixpath.normpath(path) if path else ""
    if not path or "\0" in path or ".." in path.split("/"):
        raise InvalidTask(f"{WHERE}.{field}: '{path}' is not a path without '..'")
    if not folder and normal in (".", "/", "//"):
        raise InvalidTask(f"{WHERE}.{field}: '{path}' is a folder, a file is needed")
    return path
