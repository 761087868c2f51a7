"""What the proxy needs of an inference server: tokens for tokens, with log-probabilities, and an abort that works."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Literal, Protocol

import numpy as np
from msgspec import Struct, field

from polar.completion import VersionSpan

# `failed`: the engine broke off after tokens had come.
End = Literal["stop", "length", "abort", "failed"]


class Order(Struct, kw_only=True):
    """One generation. `sampling` has max_new_tokens, temperature, top_p, top_k, min_p, stop and optionally seed.

    The engine calls `accepted` once it has the request, and `tokens` with every piece of sampled ids. Setting `cancel`
    aborts: what was sampled until then is still in the returned Sample.
    """

    rid: str
    prompt: np.ndarray
    sampling: dict[str, Any]
    stop_ids: list[int]
    tokens: Callable[[list[int]], None]
    accepted: Callable[[], None]
    cancel: asyncio.Event


class Sample(Struct, kw_only=True):
    """What was sampled. `ids` and `logprobs` align unless `untrainable` says why not. Times are Unix seconds."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    untrainable: str = ""
    end: End = "abort"
    stop_matched: int | str | None = None
    cached_tokens: int = 0
    first_token_at: float = 0.0


class Engine(Protocol):
    name: str

    async def generate(self, order: Order) -> Sample:
        """Raises CallError (context_overflow, unavailable, internal) only while nothing was sampled."""
        ...

    async def close(self) -> None: ...
