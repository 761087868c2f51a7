"""Token ids on their way to an engine, and what its answer must satisfy before it may be trained on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import orjson

from polar.completion import VersionSpan

T = TypeVar("T")

_LOWEST = -9998.0  # vLLM writes -9999 for what it doesn't know
_ROUNDING = 1e-3  # a certain token may come out above zero by that much


def decode(raw: bytes, decoder: msgspec.json.Decoder[T], typ: type[T]) -> T | None:
    """One event, or None if it is not of the contract's shape. NaN and infinities aren't JSON, and halves of surrogate pairs
    no text, but engines write them."""
    try:
        return decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        text = json.dumps(json.loads(raw), ensure_ascii=False).encode("utf-16", "surrogatepass")
        return msgspec.convert(json.loads(text.decode("utf-16", "replace")), typ)
    except (ValueError, RecursionError, msgspec.ValidationError):
        return None


def ids_json(ids: np.ndarray) -> msgspec.Raw:
    """Token ids as a part of a JSON body: many times quicker than by way of Python's integers."""
    return msgspec.Raw(orjson.dumps(np.ascontiguousarray(ids), option=orjson.OPT_SERIALIZE_NUMPY))


def ids_exist(ids: Sequence[int]) -> bool:
    return not ids or (min(ids) >= 0 and max(ids) < 1 << 31)


def logprobs(pairs: Sequence[tuple[Any, Any]], ids: Sequence[int]) -> tuple[list[float], str]:
    """Log-probabilities from (value, id), or the reason why they can't be used."""
    if len(pairs) != len(ids):
        return [], "logprob_mismatch" if pairs else "logprobs_missing"
    out = []
    for (value, token), wanted in zip(pairs, ids, strict=True):
        if token != wanted:
            return [], "logprob_mismatch"
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or value != value or abs(value) == math.inf:  # isfinite() fails for an integer beyond the doubles
            return [], "logprob_not_finite"
        if value > _ROUNDING:
            return [], "logprob_positive"
        if value < _LOWEST:
            return [], "logprob_unknown"
        out.append(min(float(value), 0.0))
    return out, ""


def versions(spans: Sequence[VersionSpan], n: int) -> tuple[list[VersionSpan], str]:
    """Spans that cover all `n` tokens without a gap, or the reason why not."""
    kept = [VersionSpan(s.version, s.start, min(s.end, n)) for s in spans if s.start < n and s.end > s.start]
    borders = [0, *(s.end for s in kept)]
    if all(s.start == b for s, b in zip(kept, borders, strict=False)) and borders[-1] == n:
        return kept, ""
    return [], "versions_mismatch"


def vocabulary(ids: Sequence[int], size: int) -> str:
    return "token_out_of_vocabulary" if size and ids and max(ids) >= size else ""
