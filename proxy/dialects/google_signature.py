"""Thought signatures: what clients echo with a part, so that a turn and its calls are known again without ids.

Base64 of `polar1 <completion id> <call id, or nothing>`. It names a completion only within the caller's own attempt, so it
needs no secret: who forges one misleads nobody but itself.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

from polar.ids import is_id

_MARK = b"polar1 "
_STANDARD = str.maketrans("-_", "+/")  # some clients re-encode URL-safe


def issue(completion: str, call: str = "") -> str:
    return base64.b64encode(_MARK + f"{completion} {call}".encode()).decode()


def read(value: Any) -> tuple[str, str] | None:
    """(completion id, call id or ""), or None if it isn't ours: other providers' signatures are garbage to us."""
    if not isinstance(value, str) or len(value) > 4096:
        return None
    text = value.translate(_STANDARD).rstrip("=")
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        if not raw.startswith(_MARK):
            return None
        completion, _, call = raw[len(_MARK) :].decode().partition(" ")
    except (binascii.Error, ValueError):
        return None
    return (completion, call) if is_id(completion) else None
