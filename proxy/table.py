"""The model table at work: a codec and an engine client per row."""

from __future__ import annotations

import os

from msgspec import Struct

from polar.config import Model, Settings
from polar.errors import InvalidConfig
from proxy.codec import Codec
from proxy.dialects.base import ModelCard
from proxy.engines.base import Engine
from proxy.engines.sglang import SGLang


class Served(Struct, frozen=True, kw_only=True):
    key: str
    row: Model
    codec: Codec
    engine: Engine


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
            key = (row.tokenizer, row.renderer, row.tool_parser, row.reasoning_parser)
            if key not in self._codecs:
                self._codecs[key] = Codec(name, row)
            api_key = None
            if row.api_key_env:
                api_key = os.environ.get(row.api_key_env)
                if not api_key:
                    raise InvalidConfig(f"models.{name}.api_key_env: the variable {row.api_key_env} is not set")
            engine = SGLang(row.engine, row.context_length, api_key)
            self._rows[name] = Served(key=name, row=row, codec=self._codecs[key], engine=engine)

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
