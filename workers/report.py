"""What RUN hands to POSTRUN through the session record."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from polar.result import Artifact, Termination


class Collected(Struct, kw_only=True, omit_defaults=True):
    """A sandbox path kept as an object: a file as it was, a folder as a tar archive."""

    path: str
    key: str
    folder: bool = False
    truncated: bool = False


class RunReport(Struct, kw_only=True, omit_defaults=True):
    termination: Termination
    message: str = ""
    exit_code: int | None = None
    notes: dict[str, Any] = field(default_factory=dict)
    collected: list[Collected] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    changes: Collected | None = None
    uncaptured: int = 0
    prewarmed: bytes = b""  # msgpack SandboxRef of an evaluation sandbox made beside RUN
