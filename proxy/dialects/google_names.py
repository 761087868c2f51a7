"""Google's JSON is protobuf's: names in camelCase or snake_case, null for unset, a single value for a list of one."""

from __future__ import annotations

import re
from typing import Any

from proxy.dialects import fields

_WORD = re.compile(r"(?<=[a-zA-Z0-9])_([a-z0-9])")


def camel(value: Any, where: str) -> dict[str, Any]:
    """The object with its own names (not those further inside) in camelCase and without unset ones."""
    given = fields.obj(value, where)
    return {(_name(k) if "_" in k else k): v for k, v in given.items() if v is not None}


def many(m: dict[str, Any], name: str, where: str) -> list[Any]:
    """A repeated field; one object or string alone is a list of one."""
    value = m.get(name)
    if isinstance(value, (dict, str)):
        return [value]
    return fields.items({where: value}, where)


def _name(key: str) -> str:
    return _WORD.sub(lambda m: m[1].upper(), key)
