"""Reading and writing the contracts: msgpack for storage, JSON and YAML for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zstandard

from polar import arrays
from polar.errors import InvalidTask
from polar.explain import explain

T = TypeVar("T")

_msgpack = msgspec.msgpack.Encoder(enc_hook=arrays.enc_msgpack)
_json = msgspec.json.Encoder(enc_hook=arrays.enc_json)


def pack(obj: Any) -> bytes:
    return _msgpack.encode(obj)


def unpack(data: bytes, typ: type[T]) -> T:
    return msgspec.msgpack.decode(data, type=typ, dec_hook=arrays.dec)


def to_json(obj: Any) -> bytes:
    return _json.encode(obj)


def from_json(data: bytes | str, typ: type[T], what: str = "request") -> T:
    """Decode and validate. Raises InvalidTask saying which field, what was found, what is allowed (`field` holds the
    path)."""
    try:
        try:
            return msgspec.json.decode(data, type=typ, dec_hook=arrays.dec)
        except msgspec.ValidationError as e:
            raise _invalid(e, msgspec.json.decode(data), typ, what) from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise InvalidTask(f"{what}: not valid JSON: {e}") from e


def compress(data: bytes) -> bytes:
    return zstandard.compress(data, 3)


def decompress(data: bytes, limit: int = 2 << 30) -> bytes:
    """Raises ValueError above `limit` bytes: results are written by our workers, but read from shared storage."""
    size = zstandard.frame_content_size(data)
    if size > limit:
        raise ValueError(f"object of {size} bytes is over the limit of {limit}")
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=limit)


def load_file(path: Path, typ: type[T]) -> list[T]:
    """Read one task or a list of tasks from .json, .jsonl, .yaml or .yml. Raises InvalidTask naming file and field."""
    if not path.is_file():
        raise InvalidTask(f"{path}: no such file")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return [from_json(line, typ, f"{path}:{n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if path.suffix in (".yaml", ".yml"):
        import yaml  # CLI extra: a trainer needs no YAML

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as e:
            raise InvalidTask(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    elif path.suffix == ".json":
        try:
            data = msgspec.json.decode(text)
        except msgspec.DecodeError as e:
            raise InvalidTask(f"{path}: not valid JSON: {e}") from e
    else:
        raise InvalidTask(f"{path}: unknown file type {path.suffix!r}; allowed: .json, .jsonl, .yaml, .yml")
    items = data if isinstance(data, list) else [data]
    return [convert(item, typ, f"{path}[{i}]" if isinstance(data, list) else str(path)) for i, item in enumerate(items)]


def convert(data: Any, typ: type[T], what: str) -> T:
    """As from_json, from what a JSON, YAML or TOML reader made of a text."""
    try:
        return msgspec.convert(data, type=typ, dec_hook=arrays.dec)
    except msgspec.ValidationError as e:
        raise _invalid(e, data, typ, what) from e


def _invalid(error: msgspec.ValidationError, data: Any, typ: Any, what: str) -> InvalidTask:
    path, sentence = explain(error, data, typ)
    wrong = InvalidTask(": ".join(x for x in (what, path, sentence) if x))
    wrong.field = path
    return wrong


__all__ = ["compress", "convert", "decompress", "from_json", "load_file", "pack", "to_json", "unpack"]
