"""What the Responses dialect hands out and recognises again: item ids that name a completion, and sealed text.

Sealed text is `encrypted_content`: not secret, only opaque. Whoever forges one gains nothing, for it reads like any other
text that a client claims to have been told.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any, Literal

import msgspec

Sealed = Literal["reasoning", "compaction"]

_SEAL = "polar1."
_ID = re.compile(r"([a-z]{2,8})_([0-9a-f]{24})(?:_([0-9]{1,6}))?")


def item_id(prefix: str, completion_id: str, index: int | None = None) -> str:
    """`<prefix>_<completion>[_<index>]`. A call's index is its place among the calls of the answer, whatever their kinds;
    any other item's the place among all items."""
    out = f"{prefix}_{completion_id.removeprefix('c-')}"
    return out if index is None else f"{out}_{index}"


def completion_of(value: Any) -> str | None:
    """The completion that an item id or call id of ours comes from; None for anybody else's."""
    parts = parts_of(value)
    return parts[1] if parts else None


def parts_of(value: Any) -> tuple[str, str, int] | None:
    """(prefix, completion id, index or 0) of what item_id() gave."""
    m = _ID.fullmatch(value) if isinstance(value, str) else None
    return (m[1], f"c-{m[2]}", int(m[3] or 0)) if m else None


def seal(kind: Sealed, completion_id: str, text: str) -> str:
    return _SEAL + base64.urlsafe_b64encode(msgspec.json.encode([kind, completion_id, text])).decode()


def unseal(kind: Sealed, value: Any) -> tuple[str, str] | None:
    """(completion id, text) of what seal() gave; None for foreign or damaged values."""
    if not isinstance(value, str) or not value.startswith(_SEAL):
        return None
    try:
        raw = base64.b64decode(value[len(_SEAL) :].encode(), altchars=b"-_", validate=True)
        found, completion_id, text = msgspec.json.decode(raw, type=tuple[str, str, str])
    except (binascii.Error, ValueError, RecursionError):
        return None
    return (completion_id, text) if found == kind else None


def summary_of(text: str, reasoning: str) -> str:
    """What an answer that was to be a summary comes to."""
    return text.strip() or reasoning.strip() or "(no summary was written)"
