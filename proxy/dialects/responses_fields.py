"""Fields of objects inside a Responses body: every refusal names the whole path."""

from __future__ import annotations

import json
from typing import Any

from proxy.failures import bad


def items(item: dict[str, Any], key: str, where: str) -> list[Any]:
    value = item.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad(f"'{where}.{key}' must be a list, not {value!r:.40}", f"{where}.{key}")
    return value


def dumps(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as e:
        raise bad(f"'{where}' is nested too deeply", where) from e
