"""Tokens to text and back, on the tokenizers library alone (it imports in milliseconds)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from engine.errors import ApiError, ModelError


class Tokenizer:
    """The tokenizer of a model folder.

    Attributes:
        eos_ids: the tokens that end a generation, from config, generation config and tokenizer together.
    """

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError(f"{folder} has no tokenizer.json (slow tokenizers aren't supported)")
        self._fast = FastTokenizer.from_file(str(path))
        self._fast.no_truncation()
        self._fast.no_padding()
        self._config = _read(folder / "tokenizer_config.json")
        self._template = _chat_template(folder, self._config)
        self.eos_ids = self._find_eos(folder)

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; special tokens written in it are recognised, none are added around it."""
        return self._fast.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; incomplete UTF-8 becomes U+FFFD."""
        return self._fast.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict], tools: list[dict] | None, generation: bool, extra: dict | None) -> str:
        """Text of a conversation through the model's chat template. Raises ApiError 400."""
        if self._template is None:
            raise ApiError("This model has no chat template.")
        from transformers.utils.chat_template_utils import render_jinja_template

        special = {key: _content(value) for key, value in self._config.items() if key.endswith("_token") and value}
        settings: dict[str, Any] = {**special, **(extra or {}), "tools": tools, "add_generation_prompt": generation}
        try:
            rendered: Any = render_jinja_template(conversations=[messages], chat_template=self._template, **settings)
        except Exception as error:  # templates raise what they like
            raise ApiError(f"The chat template refused the messages: {error}") from None
        return rendered[0][0]

    def _find_eos(self, folder: Path) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("config.json", "generation_config.json"):
            value = _read(folder / name).get("eos_token_id")
            ids.update([value] if isinstance(value, int) else value or [])
        token = _content(self._config.get("eos_token"))
        if token and (found := self._fast.token_to_id(token)) is not None:
            ids.add(found)
        return frozenset(ids)


def _read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.is_file() else {}


def _content(token: str | dict | None) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _chat_template(folder: Path, config: dict) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text()
    template = config.get("chat_template")
    return template if isinstance(template, str) else None
