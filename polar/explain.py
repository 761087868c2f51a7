"""Validation errors in words: the field's path, what was found there, and what is allowed."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
from msgspec import inspect as mi

from polar import arrays

# A found value is quoted up to this many characters, and not at all where it may be a secret.
SHOWN = 80
_SECRET = re.compile(r"(^|\.)env\b|token(?!s\b|izer)|secret|password|passwd|api_?key|credential|authorization", re.I)
_AT = re.compile(r"^(?P<what>.*?)(?: - at (?P<key>`key` in )?`(?P<path>\$.*)`)?$", re.S)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`$", re.S)
_MISSING = re.compile(r"^Object missing required field `(.*)`$", re.S)
_MAX_NAMES = 40
NO_NUL = r"^[^\x00]*$"  # what a process can be given in its environment
_PATTERNS = {NO_NUL: "text without NUL"}


def explain(error: msgspec.ValidationError, data: Any, typ: Any) -> tuple[str, str]:
    """(field path, sentence) for what msgspec said about `data` as a `typ`. The path is "" for the whole of it."""
    m = _AT.match(str(error))
    assert m
    what, raw = m["what"], m["path"] or "$"
    value, known, path = _walk(data, mi.type_info(typ), raw)
    if isinstance(error.__cause__, ValueError | TypeError) and not isinstance(error.__cause__, msgspec.MsgspecError):
        return path, what.replace("`", "'")  # a check of ours: it says itself what is allowed
    if m["key"]:
        bad = _bad_key(value, known)
        return path, f"key {_found(bad, '')} is not allowed; allowed: {_allowed(getattr(known, 'key_type', None))}"
    if name := _UNKNOWN.match(what):
        return _join(path, name[1][:SHOWN]), f"unknown field; allowed: {_fields(known, value)}"
    if name := _MISSING.match(what):
        inner = _field(known, name[1], value)
        return _join(path, name[1]), f"missing; needed: {_allowed(inner)}"
    return path, f"found {_found(value, path)}, allowed: {_allowed(known)}"


def _walk(value: Any, known: Any, raw: str) -> tuple[Any, Any, str]:
    """Follow msgspec's path through the data and the type together. `[...]` names no key: the one that fails is looked
    for."""
    path = ""
    for name, index in _STEP.findall(raw):
        if name:
            tag = _tag_of(known, name)
            known = tag if tag is not None else _field(known, name, value)
            value = value.get(name) if isinstance(value, dict) else None
            path = _join(path, name)
        elif index == "...":
            key, known = _bad_item(value, known)
            value = value[key] if isinstance(value, dict) and key is not None else None
            path = _join(path, str(key)[:SHOWN]) if key is not None else f"{path}[…]"
        else:
            known = next((getattr(t, "item_type", None) for t in _options(known) if hasattr(t, "item_type")), None)
            ok = isinstance(value, list | tuple) and int(index) < len(value)
            value = value[int(index)] if ok else None
            path = f"{path}[{index}]"
    return value, known, path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _options(known: Any) -> tuple[Any, ...]:
    if isinstance(known, mi.Metadata):
        return _options(known.type)
    return known.types if isinstance(known, mi.UnionType) else (known,)


def _structs(known: Any, value: Any) -> list[Any]:
    """The structs a value may be; of a tagged union only the one that its tag names, if it names one."""
    found = [t for t in _options(known) if isinstance(t, mi.StructType)]
    if isinstance(value, dict):
        tagged = [t for t in found if t.tag_field and value.get(t.tag_field) == t.tag]
        return tagged or found
    return found


def _field(known: Any, name: str, value: Any) -> Any:
    for t in _structs(known, value):
        if t.tag_field == name:
            return _tag_of(known, name)
        for f in t.fields:
            if f.encode_name == name:
                return f.type
    return None


def _tag_of(known: Any, name: str) -> Any:
    tags = tuple(t.tag for t in _options(known) if isinstance(t, mi.StructType) and t.tag_field == name)
    return mi.LiteralType(tags) if tags else None


def _fields(known: Any, value: Any) -> str:
    names: dict[str, None] = {}
    for t in _structs(known, value):
        if t.tag_field:
            names[t.tag_field] = None
        names.update(dict.fromkeys(f.encode_name for f in t.fields))
    return ", ".join(list(names)[:_MAX_NAMES]) or "none"


def _bad_item(value: Any, known: Any) -> tuple[Any, Any]:
    inner = next((t for t in _options(known) if isinstance(t, mi.DictType)), None)
    if inner is None or not isinstance(value, dict):
        return None, None
    for key, item in value.items():
        if not _fits(item, inner.value_type):
            return key, inner.value_type
    return None, inner.value_type


def _bad_key(value: Any, known: Any) -> Any:
    inner = next((t for t in _options(known) if isinstance(t, mi.DictType)), None)
    for key in value if isinstance(value, dict) else ():
        if inner is None and not isinstance(key, str):
            return key
        if inner is not None and not _fits(key, inner.key_type):
            return key
    return None


def _fits(value: Any, known: Any) -> bool:
    """Whether a value of JSON shape fits; only as exact as finding the culprit among a few needs."""
    for t in _options(known):
        if isinstance(t, mi.StructType):
            try:
                msgspec.convert(value, t.cls, dec_hook=arrays.dec)
                return True
            except msgspec.ValidationError:
                continue
        if isinstance(t, mi.AnyType):
            return True
        if isinstance(t, mi.StrType):
            if isinstance(value, str) and (not t.pattern or re.search(t.pattern, value)):
                return True
        elif isinstance(t, mi.BoolType):
            if isinstance(value, bool):
                return True
        elif isinstance(t, mi.IntType | mi.FloatType):
            number = isinstance(value, int if isinstance(t, mi.IntType) else int | float) and not isinstance(
                value, bool
            )
            if number and _within(value, t):
                return True
        elif isinstance(t, mi.LiteralType):
            if value in t.values:
                return True
        elif isinstance(t, mi.NoneType):
            if value is None:
                return True
        elif (isinstance(t, mi.DictType) and isinstance(value, dict)) or (
            isinstance(t, mi.ListType) and isinstance(value, list)
        ):
            inner = t.value_type if isinstance(t, mi.DictType) else t.item_type
            if all(_fits(v, inner) for v in (value.values() if isinstance(value, dict) else value)):
                return True
    return False


def _within(value: float, t: Any) -> bool:
    low = (t.ge is None or value >= t.ge) and (t.gt is None or value > t.gt)
    return low and (t.le is None or value <= t.le) and (t.lt is None or value < t.lt)


def _found(value: Any, path: str) -> str:
    kind = {str: "a text", bool: "true or false", int: "a number", float: "a number", list: "a list", dict: "a mapping"}
    if value is None:
        return "null"
    if _SECRET.search(path) or type(value) not in kind:
        return kind.get(type(value), f"a {type(value).__name__}")
    if isinstance(value, str):
        text = repr(value[: SHOWN + 1])
    elif isinstance(value, list | dict):
        # Neither its length nor what is deep inside helps; a mapping may hold an environment.
        names = f" with {', '.join(map(str, list(value)[:5]))}" if isinstance(value, dict) and value else ""
        text = f"{kind[type(value)]}{names}"
    else:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


def _allowed(known: Any) -> str:
    options = _options(known) if known is not None else ()
    words = [_word(t) for t in sorted(options, key=lambda t: isinstance(t, mi.NoneType))] or ["another value"]
    return " or ".join(dict.fromkeys(words))


def _word(t: Any) -> str:
    if isinstance(t, mi.IntType | mi.FloatType):
        word = "whole number" if isinstance(t, mi.IntType) else "number"
        bounds = [(t.gt, ">"), (t.ge, ">="), (t.lt, "<"), (t.le, "<=")]
        limits = " and ".join(f"{sign} {_number(b)}" for b, sign in bounds if b is not None)
        return f"{word} {limits}".rstrip()
    if isinstance(t, mi.StrType):
        return "text" if not t.pattern else _PATTERNS.get(t.pattern) or f"text matching {t.pattern}"
    if isinstance(t, mi.BoolType):
        return "true or false"
    if isinstance(t, mi.NoneType):
        return "null"
    if isinstance(t, mi.LiteralType):
        return ", ".join(repr(v) for v in sorted(t.values, key=str))
    if isinstance(t, mi.StructType):
        return f"mapping with {', '.join(f.encode_name for f in t.fields[:12])}{', …' if len(t.fields) > 12 else ''}"
    if isinstance(t, mi.DictType):
        return f"mapping of {_allowed(t.value_type)}"
    if isinstance(t, mi.ListType | mi.VarTupleType | mi.CollectionType):
        return f"list of {'mappings' if isinstance(t.item_type, mi.StructType) else _allowed(t.item_type)}"
    if isinstance(t, mi.CustomType):
        return "list of numbers"
    return "any value" if isinstance(t, mi.AnyType) else "another value"


def _number(value: float) -> str:
    return str(int(value)) if math.isfinite(value) and value == int(value) else str(value)
