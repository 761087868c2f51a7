"""Orders for an engine client without a proxy around it."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct, field

from polar import arrays
from proxy.engines.base import Order, Sample
from tests.proxy.fake_engine import FakeEngine, Reply, logprob

PROMPT = [1, 2, 3]


class Placed(Struct):
    """An order and what came of it."""

    order: Order
    pieces: list[int] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)
    accepted: int = 0


def place(rid: str = "c-1", prompt: list[int] | None = None, limit: int = 100, **more: Any) -> Placed:
    sampling = {"max_new_tokens": limit, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    sampling |= more.pop("sampling", {})
    placed: Placed

    def accepted() -> None:
        placed.accepted += 1

    order = Order(
        rid=rid,
        prompt=arrays.ids(PROMPT if prompt is None else prompt),
        sampling=sampling,
        stop_ids=more.pop("stop_ids", [0]),
        tokens=lambda ids: placed.pieces.extend(ids),
        accepted=accepted,
        cancel=asyncio.Event(),
        events=lambda e: placed.events.extend(e),
        **more,
    )
    placed = Placed(order)
    return placed


def continuing(engine: FakeEngine, script: list[int], *first: dict[str, Any]) -> None:
    """Make an engine sample `script` behind PROMPT, from wherever it is asked to go on; the n-th call with the n-th
    options, later ones without any."""
    options = iter(first)

    def reply(body: dict[str, Any]) -> Reply:
        assert body["input_ids"][: len(PROMPT)] == PROMPT
        done = body["input_ids"][len(PROMPT) :]
        assert done == script[: len(done)], "the context must be the ids sampled so far"
        return Reply(ids=script[len(done) :], **next(options, {}))

    engine.default = reply


def check(placed: Placed, sample: Sample, script: list[int], cuts: list[int]) -> None:
    """The sample is the whole script, with the log-probabilities that the pieces between `cuts` had."""
    assert sample.ids == placed.pieces == script
    assert not sample.untrainable
    expected = [logprob(i - max([0, *(c for c in cuts if c <= i)]), t) for i, t in enumerate(script)]
    assert sample.logprobs == expected
