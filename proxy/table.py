"""The model table at work: a codec and an engine client per row."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from polar.config import Model, Settings
from polar.errors import InvalidConfig
from proxy.codec import Codec
from proxy.dialects.base import ModelCard
from proxy.engines.openai import OpenAI
from proxy.engines.pool import Pool
from proxy.engines.sglang import SGLang
from proxy.engines.vllm import VLLM
from proxy.neutral import Message
from proxy.vocabulary import size

_CHARS_PER_TOKEN = 32  # more than any text has on average


class Served(Struct, frozen=True, kw_only=True):
    key: str
    row: Model
    codec: Codec
    engine: Pool
    vocabulary: int  # ids from here on don't exist

    def hopeless(self, messages: list[Message]) -> int:
        """How many tokens messages have at least, if that is more than ever fit; else 0. Such are not worth reading, nor
        tokenising: it would only keep the others waiting."""
        arguments = (c["function"]["arguments"] for m in messages for c in m.get("tool_calls") or ())
        length = sum(len(m["content"]) for m in messages) + sum(map(len, arguments))
        least = max(len(messages), length // _CHARS_PER_TOKEN)
        return least if least > self.row.context_length else 0


class Table:
    """Rows by name; a name that isn't there means the session's own model, and that failing the default."""

    def __init__(self, settings: Settings):
        if not settings.models:
            raise InvalidConfig("models: the table is empty; the proxy needs at least one row, as in [models.policy]")
        self._settings = settings
        self._codecs: dict[tuple, Codec] = {}
        self._rows: dict[str, Served] = {}

    async def open(self) -> None:
        """Load every tokenizer. Raises InvalidConfig naming the row."""
        for name, row in self._settings.models.items():
            _check_urls(name, row)
            key = (row.tokenizer, row.renderer, row.tool_parser, row.reasoning_parser)
            if key not in self._codecs:
                self._codecs[key] = Codec(name, row)
            api_key = None
            if row.api_key_env:
                api_key = os.environ.get(row.api_key_env)
                if not api_key:
                    raise InvalidConfig(f"models.{name}.api_key_env: the variable {row.api_key_env} is not set")
            codec = self._codecs[key]
            vocabulary = size(codec._tokenizer, row.tokenizer)
            engine = _engine(name, row, api_key)
            self._rows[name] = Served(key=name, row=row, codec=codec, engine=engine, vocabulary=vocabulary)

    def engines(self) -> dict[str, Any]:
        """How the servers of each row fare."""
        return {name: served.engine.state() for name, served in self._rows.items()}

    def forget(self, session: str) -> None:
        """It has ended."""
        for served in self._rows.values():
            served.engine.forget(session)

    def pick(self, wanted: str, own: str) -> Served:
        if wanted in self._rows:
            return self._rows[wanted]
        return self._rows[self._settings.model(own)[0]]

    def cards(self, own: str) -> list[ModelCard]:
        names = dict.fromkeys([own, *self._rows])
        return [self.card(n, own) for n in names]

    def card(self, name: str, own: str) -> ModelCard:
        return ModelCard(name=name, context_length=self.pick(name, own).row.context_length)

    async def close(self) -> None:
        for served in self._rows.values():
            await served.engine.close()
        for codec in self._codecs.values():
            codec.close()


def _engine(name: str, row: Model, api_key: str | None) -> Pool:
    if row.protocol == "vllm":
        return VLLM(row.engines, row.context_length, api_key, model=row.engine_model)
    if row.protocol == "openai":
        return OpenAI(row.engines, row.context_length, api_key, model=row.engine_model or name)
    return SGLang(row.engines, row.context_length, api_key)


def _check_urls(name: str, row: Model) -> None:
    urls = [u.rstrip("/") for u in row.engines]
    if not urls:
        raise InvalidConfig(f"models.{name}.engine: the list is empty; it needs the base URL of at least one server")
    for url in urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidConfig(f"models.{name}.engine: found '{url}', allowed: http://… or https://…")
        if urls.count(url) > 1:
            raise InvalidConfig(f"models.{name}.engine: '{url}' is there twice")
