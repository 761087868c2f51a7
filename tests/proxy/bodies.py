"""Random JSON, and valid bodies with something wrong in them."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXT, inner, max_size=3),
    max_leaves=8,
)


def mutated(data: Any, body: dict[str, Any], most: int = 2) -> dict[str, Any]:
    """`body` with up to `most` values, anywhere in it, replaced by any JSON or left out."""
    out = copy.deepcopy(body)
    for _ in range(data.draw(st.integers(1, most))):
        places = list(_places(out))
        if not places:
            break
        holder, key = data.draw(st.sampled_from(places))
        if isinstance(holder, dict) and data.draw(st.integers(0, 4)) == 0:
            del holder[key]
        else:
            holder[key] = data.draw(JSON)
    return out


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])
