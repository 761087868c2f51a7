"""What a provider dialect is to the proxy: paths, a parser, an error envelope, and an encoder of neutral events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from msgspec import Struct, field

from proxy.failures import CallError
from proxy.neutral import Event, Request

Action = Literal["generate", "count", "models", "model"]


class Route(Struct, frozen=True):
    """`path` is a regular expression over the path without the `/s/<capability>` prefix; named groups are parameters."""

    method: str
    path: str
    action: Action


class Call(Struct, frozen=True, kw_only=True):
    """The HTTP side of a request: the path's parameters and the query."""

    params: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)


class Answer(Struct, frozen=True, kw_only=True):
    """What an encoder knows from the start. `created` is in Unix seconds."""

    id: str
    model: str
    created: int
    request: Request


class ModelCard(Struct, frozen=True, kw_only=True):
    name: str
    context_length: int


class Encoder(Protocol):
    """Turns events into the bytes of a stream; called in the order of the events."""

    def start(self) -> bytes: ...

    def event(self, event: Event) -> bytes: ...

    def heartbeat(self) -> bytes:
        """Data that keeps the client's idle timer from firing and means nothing."""
        ...


class Dialect(Protocol):
    name: str

    @property
    def routes(self) -> tuple[Route, ...]: ...

    @property
    def stream_headers(self) -> Mapping[str, str]: ...

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        """Raises CallError (`bad_request`) naming the field."""
        ...

    def error(self, error: CallError) -> tuple[int, bytes]:
        """HTTP status and JSON body."""
        ...

    def encoder(self, answer: Answer) -> Encoder: ...

    def whole(self, answer: Answer, events: list[Event]) -> bytes:
        """The JSON answer: the fold of the events that a stream would have sent."""
        ...

    def counted(self, tokens: int) -> bytes: ...

    def models(self, cards: list[ModelCard]) -> bytes: ...

    def model(self, card: ModelCard) -> bytes: ...
