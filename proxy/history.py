"""Message histories as chained digests: two histories share their first k messages exactly if digest k is equal.

Harnesses change how they write an assistant turn that they echo: white space at the edges, the JSON formatting of
arguments, reasoning left out, call ids of their own. The digests ignore that. What anybody else said is taken to the letter.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from typing import Any

import msgspec

from proxy import pieces
from proxy.neutral import Message

_VALUES = 5000  # in arguments that are compared by value; walking through many more would hold up all streams
_encode = msgspec.json.Encoder().encode

# The history of no messages.
START = array("Q", [int.from_bytes(hashlib.blake2b(b"history", digest_size=8).digest(), "big")])


def step(before: int, m: Message, rank: int = 0, reasoning: str = "") -> int:
    """The digest behind one more message. `rank`: the call that a tool result answers; `reasoning` counts where an
    assistant turn's is not the one that was sampled there."""
    h = hashlib.blake2b(before.to_bytes(8, "big"), digest_size=8)
    h.update(_encode(_normal(m, rank)))
    if reasoning:
        h.update(b"\0" + reasoning.strip().encode("utf-8", "surrogatepass"))
    return int.from_bytes(h.digest(), "big")


class Ranks:
    """Which call a tool result answers: by its id, or by its place where the harness made up ids of its own."""

    def __init__(self, calls: list[str] | None = None):
        self._calls, self._seen = {c: i for i, c in enumerate(calls or [])}, 0

    def turn(self, m: Message) -> None:
        self._calls, self._seen = {c: i for i, c in enumerate(call_ids(m))}, 0

    def result(self, m: Message) -> int:
        rank = self._calls.get(m.get("tool_call_id") or "", self._seen)
        self._seen += 1
        return rank


def shared(a: array, b: array) -> int:
    """How many messages two histories share from their start."""
    lo, hi = 0, min(len(a), len(b)) - 1
    while lo < hi:  # equal digests mean equal beginnings, so this can be bisected
        mid = (lo + hi + 1) // 2
        if a[mid] == b[mid]:
            lo = mid
        else:
            hi = mid - 1
    return lo


def unordered(tools: list[Any]) -> str:
    """A hash of the tools whatever their order."""
    return hashlib.blake2b(b"".join(sorted(map(_encode, tools))), digest_size=16).hexdigest()


def _normal(m: Message, rank: int) -> list[Any]:
    content = m["content"]
    if m["role"] == "tool":
        return ["tool", content, rank]
    if m["role"] != "assistant":
        return [m["role"], content]
    calls = [[c["function"]["name"], normal_arguments(c["function"]["arguments"])] for c in m.get("tool_calls") or ()]
    return ["assistant", content.strip(), *calls]


def dense(text: str) -> bool:
    """Whether arguments have so many values that they are taken to the letter."""
    return text.count(",") > _VALUES and pieces.values(text.encode("utf-8", "replace")) > _VALUES


def normal_arguments(text: str) -> Any:
    """Arguments without their formatting: key order, white space, escapes, `1.0` or `1`; dense ones to the letter."""
    if dense(text):
        return text.strip()
    try:
        return _normal_json(json.loads(text))
    except (ValueError, RecursionError):
        return text.strip()


def _normal_json(value: Any) -> Any:
    if isinstance(value, dict):
        pairs = ((_whole(k), _normal_json(v)) for k, v in value.items())
        return {"": sorted(([k, v] for k, v in pairs), key=lambda p: p[0])}
    if isinstance(value, list):
        return [_normal_json(v) for v in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        # JavaScript harnesses read every number as a double, and write -0 as 0.
        try:
            return {"n": repr(float(value) + 0.0)}
        except OverflowError:
            return {"n": "inf" if value > 0 else "-inf"}
    return _whole(value)


def _whole(text: str) -> str:
    """Half surrogate pairs as what they become in a body."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def call_ids(m: Message) -> list[str]:
    return [c["id"] for c in m.get("tool_calls") or () if c.get("id")]


def refs(m: Message) -> list[str]:
    """Ids of completions that the turn says it is from."""
    return [r for r in m.get("refs") or () if isinstance(r, str)]


def reasoning(m: Message) -> str:
    return (m.get("reasoning_content") or "").strip()


def same_reasoning(ours: str, theirs: str) -> bool:
    """Whether `theirs` is what may be left of `ours` after a harness echoed it: missing, trimmed, or cut off."""
    return ours.strip().startswith(theirs.strip())
