"""What a provider dialect is to the proxy: paths, a parser, an error envelope, and an encoder of neutral events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from msgspec import Struct, field

from proxy.failures import CallError
from proxy.neutral import Event, Message, Request

INSTRUCTED = "instructed"  # label of a completion whose first message was an instruction for this one request
Action = Literal["generate", "count", "models", "model", "websocket"]


class Route(Struct, frozen=True):
    """`path` is a regular expression over the path without the `/s/<capability>` prefix; named groups are parameters. With
    `marks` it is meant only if the request has one of these headers or query parameters (dialects share some paths)."""

    method: str
    path: str
    action: Action
    marks: tuple[str, ...] = ()


class Cited(Struct, frozen=True, kw_only=True):
    """Completions of the session that a body names instead of saying again what was said: by an item of theirs, or as the
    one that the conversation goes on `after` ("": none)."""

    items: frozenset[str] = frozenset()
    after: str = ""


class Recalled(Struct, frozen=True, kw_only=True):
    """What is known of a citation: responses by completion id, and the conversation that the request goes on after, that
    completion's response included. `instructed`: its first message was an instruction for that one request."""

    responses: dict[str, Message] = field(default_factory=dict)
    conversation: list[Message] = field(default_factory=list)
    instructed: bool = False


class Call(Struct, frozen=True, kw_only=True):
    """The HTTP side of a request: the path's parameters, the query, the headers (names in lower case); and what the session
    knows of what it cites."""

    params: dict[str, str] = field(default_factory=dict)
    query: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    recalled: Recalled = Recalled()


class Answer(Struct, frozen=True, kw_only=True):
    """What an encoder knows from the start. `id` is the completion's, `created` in Unix seconds; `prompt_tokens` is 0 while
    the prompt isn't known yet; `context_length` of the model counts prompt and answer, 0 if it isn't known."""

    id: str
    model: str
    created: int
    request: Request
    prompt_tokens: int = 0
    context_length: int = 0


class ModelCard(Struct, frozen=True, kw_only=True):
    name: str
    context_length: int


class Encoder(Protocol):
    """Turns events into the bytes of a stream; called in the order of the events."""

    headers: Mapping[str, str]

    def start(self) -> bytes: ...

    def event(self, event: Event) -> bytes: ...

    def heartbeat(self) -> bytes:
        """Data that keeps the client's idle timer from firing and means nothing."""
        ...


@runtime_checkable
class Parting(Protocol):
    """An encoder that has last words for a stream which is broken off by a clean end."""

    def broken(self, error: bytes) -> bytes:
        """`error` is the dialect's JSON body of what went wrong."""
        ...


@runtime_checkable
class Citing(Protocol):
    """A dialect whose requests may name what was said earlier in their session."""

    def cites(self, body: dict[str, Any]) -> Cited | None:
        """Never raises: what is malformed, parse() refuses."""
        ...


class Dialect(Protocol):
    """`own`: what a path begins with that only this dialect's clients ask for: where nobody serves it, the refusal comes in
    their envelope. `broken` is how a stream that can't be finished is broken off: by a connection reset, or by a clean end
    without the terminal event, where that is what the clients retry."""

    name: str
    own: re.Pattern[str]
    broken: Literal["reset", "end"]

    @property
    def routes(self) -> tuple[Route, ...]: ...

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
