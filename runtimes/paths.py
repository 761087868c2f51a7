"""Paths as a sandbox means them."""

from __future__ import annotations

import posixpath

from polar.sandbox import SandboxRef


def inside(ref: SandboxRef, path: str) -> str:
    """Absolute: relative ones start at the working directory, `~/` at the agent's HOME."""
    if path == "~" or path.startswith("~/"):
        path = ref.state.get("home", "/root") + path[1:]
    return posixpath.join(ref.workdir, path) if path else ref.workdir
