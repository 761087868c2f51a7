"""One generation: what was asked for and how far it is."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import torch

from engine.kv import Sequence
from engine.protocol import SamplingParams
from engine.text import GrowingText


class View(NamedTuple):
    """A consistent snapshot for readers on other threads."""

    tokens: int  # so many of the request's output tokens
    text: str  # their text
    finish: dict | None  # finish_reason once it is over
    failed: int = 0  # HTTP status, where the generation failed


class Request:
    """A generation in flight. Only the model thread changes it; other threads read up to `view.tokens`
    entries.
    """

    def __init__(
        self,
        *,
        rid: str,
        group: str,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        text: GrowingText,
        want_logprob: bool = False,
        logprob_start: int = -1,
        top: int = 0,
        probe_ids: list[int] | None = None,
        counted: bool = True,
    ):
        self.rid, self.group = rid, group
        self.prompt, self.params = prompt, params
        self.limit = limit  # most tokens to sample
        self.text = text
        self.want_logprob, self.top, self.probe_ids = want_logprob, top, probe_ids
        # Prompt log-probabilities are wanted from this position on; the prompt's length means none.
        self.logprob_start = min(logprob_start, len(prompt)) if want_logprob and logprob_start >= 0 else len(prompt)
        self.counted = counted  # in the metrics
        self.order = 0  # position in the order of arrival

        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[float, int]]] = []
        self.probes: list[list[tuple[float, int]]] = []
        # As in SGLang, the first wanted prompt token has no log-probability.
        self.input_logprobs: list[float | None] = [None] if self.logprob_start < len(prompt) else []
        self.input_tops: list[list[tuple[float, int]] | None] = [None for _ in self.input_logprobs]
        self.input_probes: list[list[tuple[float, int]] | None] = [None for _ in self.input_logprobs]
        self.spans: list[list] = []  # [version, start, end] over output tokens
        self.kv: Sequence | None = None
        self.cached: int | None = None  # prompt tokens that came from the prefix cache
        self.retractions = 0
        self.generator: torch.Generator | None = None
        if params.sampling_seed is not None:
            self.generator = torch.Generator().manual_seed(params.sampling_seed % 2**63)

        self.created = time.time()
        self.started: float | None = None
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.finished: float | None = None
        self.view = View(0, "", None)
        self.changed = asyncio.Event()

    @property
    def memory(self) -> Sequence:
        """Its keys and values; only a running request has them."""
        if self.kv is None:
            raise RuntimeError(f"request {self.rid} isn't running")
        return self.kv

    @property
    def length(self) -> int:
        """Tokens of prompt and output together."""
        return len(self.prompt) + len(self.output)

    @property
    def first_wanted(self) -> int:
        """The first position whose logits are wanted: they predict the token after it."""
        known = self.logprob_start + len(self.input_logprobs)
        return known - 1 if known < len(self.prompt) else self.length - 1

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens [start, end) of prompt and output."""
        prompt = len(self.prompt)
        return self.prompt[start:end] + self.output[max(0, start - prompt) : max(0, end - prompt)]

    def append(self, token: int, logprob: float, version: str) -> None:
        """Add a sampled token, made by weights of `version`."""
        self.output.append(token)
        self.logprobs.append(logprob)
        count = len(self.output)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = count
        else:
            self.spans.append([version, count - 1, count])
        self.last_token = time.time()
        self.first_token = self.first_token or self.last_token

    def publish(self, finish: dict | None = None, failed: int = 0) -> None:
        """Make the present state visible to readers; with `finish` for the last time."""
        if finish is not None:
            self.text.close()
            self.finished = time.time()
        self.view = View(len(self.output), self.text.visible(final=finish is not None), finish, failed)
