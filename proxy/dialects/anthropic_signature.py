"""What stands in a thinking block's `signature`: the id of the completion that the block came from.

Clients give signatures back verbatim, so they say which completion a turn is even where its text was edited. They are no
secret and prove nothing: whoever uses the id looks it up among the attempt's own completions.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any

_MAGIC = b"polar\x01"
_CHECK = 6  # bytes
_LONGEST = 512


def seal(completion_id: str) -> str:
    """Base64 text (padded)."""
    raw = _MAGIC + completion_id.encode()
    return base64.b64encode(raw + _check(raw)).decode()


def unseal(signature: Any) -> str | None:
    """The completion id, or None for anything that isn't a signature of ours."""
    if not isinstance(signature, str) or len(signature) > _LONGEST:
        return None
    try:
        raw = base64.b64decode(signature, validate=True)
        body, check = raw[:-_CHECK], raw[-_CHECK:]
        if not body.startswith(_MAGIC) or check != _check(body):
            return None
        return body[len(_MAGIC) :].decode() or None
    except (binascii.Error, ValueError):
        return None


def _check(raw: bytes) -> bytes:
    return hashlib.blake2b(raw, digest_size=_CHECK).digest()
