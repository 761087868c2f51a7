"""Long JSON, decoded in pieces: one call of the decoder stops every other thread of the process until it returns."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

PIECE = 256 << 10  # bytes; what is shorter is decoded in one call
_DEPTH = 8  # as deep as any dialect nests what may be long; each level is skimmed again
_WINDOW = 1 << 20
_QUOTE, _ESCAPE = b'"'[0], b"\\"[0]
_SKIMMED = dict[str, msgspec.Raw] | list[msgspec.Raw]
_STRUCTURE = np.zeros(256, bool)
_STRUCTURE[list(b",[{")] = True


def decode(raw: bytes | msgspec.Raw, leaf: Any = msgspec.json.decode, depth: int = _DEPTH) -> Any:
    """As `leaf` does it, in calls of at most PIECE bytes each, but for longer strings and what is nested deeper."""
    if len(raw) <= PIECE or not depth:
        return leaf(raw)
    try:
        inside = msgspec.json.decode(raw, type=_SKIMMED)
    except msgspec.DecodeError:  # a text or a number, or what only the leaf can read
        return leaf(raw)
    if isinstance(inside, dict):
        return {k: decode(v, leaf, depth - 1) for k, v in inside.items()}
    return [decode(v, leaf, depth - 1) for v in inside]


def values_at_most(raw: bytes) -> int:
    """A quick bound: commas and brackets in strings count, too."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def values(raw: bytes) -> int:
    """How many values valid JSON has, give or take one for each list or object."""
    count, inside, run = 0, False, 0  # whether the window begins inside a string, and behind how many backslashes
    view = np.frombuffer(raw, np.uint8)
    for start in range(0, len(view), _WINDOW):
        window = view[start : start + _WINDOW]
        place = np.arange(len(window))
        plain = np.maximum.accumulate(np.where(window != _ESCAPE, place, -1 - run))  # the last that is no backslash
        before = np.concatenate([[run], (place - plain)[:-1]])  # backslashes right before each
        quotes = (window == _QUOTE) & (before % 2 == 0)
        within = (np.cumsum(quotes) + inside) % 2 == 1
        count += int(np.count_nonzero(_STRUCTURE[window] & ~within))
        inside = bool(within[-1])
        run = int(place[-1] - plain[-1])
    return count
