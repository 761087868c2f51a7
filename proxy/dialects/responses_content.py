"""Message content of the Responses dialect as text."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from proxy.dialects import fields
from proxy.failures import bad

_TEXTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


class Reader:
    """`images` counts those that became lines of text."""

    def __init__(self) -> None:
        self.images = 0

    def text(self, value: Any, where: str, between: str = "") -> str:
        """Text of a string or a list of parts; images become lines that stand for them."""
        if value is None:
            return ""
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise bad(f"'{where}' must be a string or a list of parts", where)
        texts, plain = [], True
        for j, raw in enumerate(value):
            here = f"{where}[{j}]"
            part = fields.obj(raw, here)
            kind = part.get("type")
            if kind in _TEXTS:
                texts.append(fields.text_at(part, "refusal" if kind == "refusal" else "text", here))
                continue
            plain = False
            if kind in ("input_image", "computer_screenshot"):
                texts.append(self.image(part.get("image_url") or part.get("file_id"), here))
            elif kind == "input_file":
                texts.append(_file(part, here))
            else:
                raise bad(f"{here} is {kind!r:.40}; this model reads text only", here, "unsupported_content")
        return (between if plain else "\n").join(texts)

    def image(self, source: Any, where: str) -> str:
        if not isinstance(source, str):
            raise bad(f"'{where}.image_url' must be a string", f"{where}.image_url")
        self.images += 1
        media, _, data = source.removeprefix("data:").partition(";base64,")
        return fields.image_placeholder(media, data) if data else fields.image_placeholder("", source)


def _file(part: dict[str, Any], where: str) -> str:
    """A text file's content; anything else can't be read here."""
    name = fields.text_at(part, "filename", where, "")
    head, _, data = fields.text_at(part, "file_data", where, "").partition(";base64,")
    media = head.removeprefix("data:")
    if not data or not (media.startswith("text/") or media in ("application/json", "application/xml")):
        raise bad(f"{where} is a file that can't be read here: send text as file_data", where, "unsupported_content")
    try:
        return f"[file {name}]\n{base64.b64decode(data, validate=True).decode()}"
    except (binascii.Error, UnicodeDecodeError) as e:
        raise bad(f"'{where}.file_data' is not text in UTF-8 and base64", f"{where}.file_data") from e
