"""Reading untrusted JSON bodies: every refusal names the field."""

from __future__ import annotations

import hashlib
from typing import Any

from proxy.failures import bad


def text(body: dict[str, Any], name: str, default: str | None = None) -> str:
    value = body.get(name, default)
    if not isinstance(value, str):
        raise bad(f"'{name}' must be a string, not {_kind(value)}", name)
    return value


def text_at(body: dict[str, Any], name: str, where: str, default: str | None = None) -> str:
    """The text of an object that stands at `where`; null is the same as missing."""
    full = f"{where}.{name}"
    value = body.get(name)
    return text({full: default if value is None else value}, full)


def flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise bad(f"'{name}' must be true or false, not {_kind(value)}", name)
    return value


def flag_at(body: dict[str, Any], name: str, where: str) -> bool:
    full = f"{where}.{name}"
    return flag({full: body.get(name)}, full)


def items(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(f"'{name}' must be a list, not {_kind(value)}", name)
    return value


def count(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < 1 << 53 or value % 1:
        raise bad(f"'{name}' must be a positive integer, not {value!r:.40}", name)
    return int(value)


def obj(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad(f"'{name}' must be an object, not {_kind(value)}", name)
    return value


def stops(body: dict[str, Any], name: str) -> list[str]:
    """Stop sequences: a string, a list of strings, or nothing."""
    value = body.get(name)
    values = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(values, list) or not all(isinstance(s, str) for s in values):
        raise bad(f"'{name}' must be a string or a list of strings", name)
    if len(values) > 16 or any(len(s) > 500 for s in values):
        raise bad(f"'{name}' may have at most 16 strings of at most 500 characters", name)
    return [s for s in values if s]


def wishes(body: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """Sampling wishes under neutral names; `names` maps the body's names to them. Numbers are checked, nothing obeyed."""
    out: dict[str, Any] = {}
    for theirs, ours in names.items():
        value = body.get(theirs)
        if value is None:
            continue
        if ours in ("temperature", "top_p", "top_k", "min_p", "seed"):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise bad(f"'{theirs}' must be a number, not {_kind(value)}", theirs)
            if not abs(value) < 1 << 63:
                raise bad(f"'{theirs}' is out of range", theirs)
        out[ours] = value
    return out


def image_placeholder(media_type: str, data: str) -> str:
    """What a text model reads in place of an image: stable, and different for different images."""
    digest = hashlib.blake2b(data.encode("utf-8", "replace"), digest_size=4).hexdigest()
    return f"[image {media_type[:64] or 'of unknown type'}, {digest}: not shown, this model reads text only]"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null or missing"}
    return names.get(type(value), "a number")
