"""What the proxy needs of an inference server: tokens for tokens, with log-probabilities, and an abort that works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct, field

from polar.completion import VersionSpan
from polar.errors import EngineError
from proxy.neutral import Event, Message, ToolChoice

# `failed`: the engine broke off after tokens had come.
End = Literal["stop", "length", "abort", "failed"]


def _ignore(_: Any) -> None:
    pass


class Order(Struct, kw_only=True):
    """One generation. `sampling` has max_new_tokens, temperature, top_p, top_k, min_p, stop and optionally seed.

    The engine calls `accepted` once it has the request, and `tokens` with every piece of sampled ids (`events` instead, if
    it renders and parses by itself). Setting `cancel` aborts: what was sampled until then is still in the returned Sample.
    """

    rid: str
    prompt: np.ndarray
    sampling: dict[str, Any]
    stop_ids: list[int]
    tokens: Callable[[list[int]], None]
    accepted: Callable[[], None]
    cancel: asyncio.Event
    session: str = ""  # calls of one session go to one server, which knows their beginning already
    vocabulary: int = 0  # ids from here on don't exist; 0: unknown
    decode: Callable[[list[int]], str] | None = None  # finds stop strings that an interruption cut in two
    gate: Callable[[], Awaitable[None]] | None = None  # awaited before it is asked for again
    schema: dict[str, Any] | None = None  # of the JSON that the answer must be; {}: any object
    messages: list[Message] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    events: Callable[[list[Event]], None] = _ignore


class Sample(Struct, kw_only=True):
    """What was sampled. `ids` and `logprobs` align unless `untrainable` says why not. Times are Unix seconds.

    `message`, `prompt` and the counts are only there if the server renders by itself: its own parse, the prompt ids it
    said it used (None: it didn't say), and its token counts.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    untrainable: str = ""
    end: End = "abort"
    stop_matched: int | str | None = None
    cached_tokens: int = 0
    first_token_at: float = 0.0
    resumed: int = 0  # how often it was interrupted and taken up again
    message: Message | None = None
    prompt: list[int] | None = None
    prompt_tokens: int = 0
    sampled_tokens: int = 0

    @property
    def empty(self) -> bool:
        return not self.ids and self.message is None


class Ask(Struct, kw_only=True):
    """One request to one server: a whole order, or the rest of an interrupted one. `tokens` gets every piece of sampled
    ids and says whether they are the last ones wanted."""

    order: Order
    rid: str
    prompt: np.ndarray
    limit: int
    seed: int | None
    tokens: Callable[[list[int]], bool]


class Reader(Protocol):
    """Reads an answer. `done`: nothing of value can follow. `begun`: something was sampled. `error`: a refusal that came
    inside the stream. `fault`: how the answer broke the contract; what was read before it still holds."""

    error: Any
    fault: str

    @property
    def done(self) -> bool: ...

    @property
    def begun(self) -> bool: ...

    def read(self, data: list[bytes]) -> list[int]:
        """Take the data of events; returns the new ids."""
        ...

    def sample(self) -> Sample: ...


class Wire(Protocol):
    """A server's contract: paths and shapes. `resumable`: a completion can go on from its ids. `renders`: the server
    applies a chat template of its own. `probe`: GET it to see whether the server answers. `extras`: a request may have
    fields that not every such server knows; `plain` leaves them out."""

    name: str
    path: str
    probe: str
    resumable: bool
    renders: bool
    extras: bool

    def body(self, ask: Ask, plain: bool = False) -> bytes: ...

    def reader(self, ask: Ask) -> Reader: ...

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        """Path and body of an abort; None where closing the connection is one."""
        ...


class Interrupted(EngineError):
    """The server ended a request by itself before a token came: nothing is wrong with it, it is being updated."""


class Malformed(EngineError):
    """The server's answer breaks its own contract."""

    code = "engine_protocol"


class Engine(Protocol):
    name: str
    renders: bool

    async def generate(self, order: Order) -> Sample:
        """Raises CallError (context_overflow, unavailable, bad_request, internal) only while nothing was sampled."""
        ...

    async def close(self) -> None: ...
