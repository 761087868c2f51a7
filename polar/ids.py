"""Identifiers. Ids are sortable by creation and safe in keys, paths, container names and URLs."""

from __future__ import annotations

import re
import secrets
import time

# One path segment, no leading dot or dash: also a legal container name and object key segment.
# (`$` alone would let a trailing newline pass; `\Z` isn't known to JSON Schema's regular expressions.)
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$(?!\n)"
_ID = re.compile(ID_PATTERN)


def new_id(prefix: str) -> str:
    """`prefix-<48-bit milliseconds><48 random bits>` in hex."""
    return f"{prefix}-{int(time.time() * 1000):012x}{secrets.token_hex(6)}"


def is_id(text: str) -> bool:
    return bool(_ID.match(text))


def session_id(task_id: str, index: int) -> str:
    return f"{task_id}.s{index}"


def attempt_id(session: str, attempt: int) -> str:
    """The label of one attempt: carried by its sandbox, its capability and its capture stream."""
    return f"{session}.a{attempt}"


def new_capability() -> str:
    """256 bits, URL-safe. Shaped as an API key because harnesses send it as one."""
    return "sk-polar-" + secrets.token_urlsafe(32)
