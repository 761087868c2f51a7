"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

HEADERS: Mapping[str, str] = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
_encode = msgspec.json.Encoder().encode


def data(value: Any) -> bytes:
    return b"data: " + _encode(value) + b"\n\n"


def event(name: str, value: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode(value) + b"\n\n"
