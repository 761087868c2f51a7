"""numpy arrays inside msgspec structs: `[dtype, bytes]` in msgpack, plain lists in JSON."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

# Only what the contracts use: a decoder that takes any dtype string would take object arrays too.
_DTYPES = {"<i4", "<f4", "|u1", "<i8"}


def ids(values: Any) -> np.ndarray:
    return np.asarray(values, dtype="<i4").reshape(-1)


def floats(values: Any) -> np.ndarray:
    return np.asarray(values, dtype="<f4").reshape(-1)


def mask(values: Any) -> np.ndarray:
    return np.asarray(values, dtype="|u1").reshape(-1)


def enc_msgpack(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        if obj.ndim != 1 or obj.dtype.str not in _DTYPES:
            raise TypeError(f"array of dtype {obj.dtype.str} and {obj.ndim} dimensions is not part of a contract")
        return [obj.dtype.str, obj.tobytes()]
    raise TypeError(f"{type(obj).__name__} can't be encoded")


def enc_json(obj: Any) -> Any:
    if isinstance(obj, np.ndarray):
        return obj.tolist()
    if isinstance(obj, np.generic):
        return obj.item()
    raise TypeError(f"{type(obj).__name__} can't be encoded")


def dec(typ: type, obj: Any) -> Any:
    if typ is np.ndarray:
        if isinstance(obj, (list, tuple)) and len(obj) == 2 and isinstance(obj[0], str):
            dtype, raw = obj
            if dtype not in _DTYPES or not isinstance(raw, (bytes, memoryview)):
                raise msgspec.ValidationError(f"array dtype {dtype!r} is not one of {sorted(_DTYPES)}")
            return np.frombuffer(raw, dtype=dtype)
        if isinstance(obj, list):
            return np.asarray(obj, dtype="<f4" if any(isinstance(v, float) for v in obj) else "<i4")
        raise msgspec.ValidationError("expected an array")
    raise NotImplementedError(typ)
