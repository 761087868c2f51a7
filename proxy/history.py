"""Message histories as chained digests: two histories share their first k messages exactly if digest k is equal.

Harnesses change what they echo: white space at the edges, JSON formatting of arguments, reasoning left out. The digests
ignore that, and tool-call ids too.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

import msgspec

from proxy.neutral import Message

_encode = msgspec.json.Encoder().encode


def chain(seed: str, messages: list[Message]) -> array:
    """Unsigned 64-bit digests (n + 1,): index k stands for the first k messages."""
    first = hashlib.blake2b(seed.encode(), digest_size=8).digest()
    return extend(array("Q", [int.from_bytes(first, "big")]), messages)


def extend(digests: array, messages: list[Message]) -> array:
    """The digests continued over more messages; the argument is left as it is."""
    out = array("Q", digests)
    for m in messages:
        h = hashlib.blake2b(out[-1].to_bytes(8, "big"), digest_size=8)
        h.update(_encode(_normal(m)))
        out.append(int.from_bytes(h.digest(), "big"))
    return out


def shared(a: array, b: array) -> int:
    """How many messages two histories share from their start; -1 if not even their seed."""
    lo, hi = -1, min(len(a), len(b)) - 1
    while lo < hi:  # equal digests mean equal beginnings, so this can be bisected
        mid = (lo + hi + 1) // 2
        if a[mid] == b[mid]:
            lo = mid
        else:
            hi = mid - 1
    return lo


def _normal(m: Message) -> list[Any]:
    calls = [[c["function"]["name"], normal_arguments(c["function"]["arguments"])] for c in m.get("tool_calls") or ()]
    return [m["role"], m["content"].strip(), *calls]


def normal_arguments(text: str) -> Any:
    """Arguments without their formatting: key order, white space, `1.0` or `1`."""
    try:
        return _normal_json(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def _normal_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {"": [[k, _normal_json(value[k])] for k in sorted(value)]}
    if isinstance(value, list):
        return [_normal_json(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        # JavaScript harnesses read every number as a double.
        try:
            return {"n": repr(float(value))}
        except OverflowError:
            return {"n": "inf"}
    return value.encode("utf-8", "replace").decode()


def call_ids(m: Message) -> list[str]:
    return [c["id"] for c in m.get("tool_calls") or () if c.get("id")]


def same_reasoning(ours: str, theirs: str) -> bool:
    """Whether `theirs` is what may be left of `ours` after a harness echoed it: missing, trimmed or cut."""
    ours, theirs = ours.strip(), theirs.strip()
    return not theirs or theirs in ours
