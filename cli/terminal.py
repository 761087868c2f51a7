"""What may reach a terminal: text as it is. No markup is read in it and no control character is passed on.

Messages and names come from agents and from what runs in their sandboxes.
"""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

# Control characters but tab and line feed; marks that reorder or break a line; halves of pairs, which UTF-8 can't carry.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)  # fmt: skip


class Terminal(Console):
    """A console that takes strings literally. What is to be styled is a `Text` (`Text.assemble`)."""

    def __init__(self, **kw: Any):
        super().__init__(markup=False, emoji=False, highlight=False, **kw)

    def render_str(self, text: str, **kw: Any) -> Text:
        return super().render_str(visible(text), **kw)


def visible(text: str) -> str:
    r"""`text` with what a terminal would obey written out: `\x1b`, `\u202e`."""
    return _CONTROL.sub(lambda m: m[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` where only one line belongs: it can't pass for lines of ours."""
    return " ".join(text.split())


def json_safe(text: str) -> str:
    """A JSON text with its control characters escaped, as JSON allows but doesn't ask for."""
    return _CONTROL.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
