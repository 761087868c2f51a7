"""vLLM's token-in, token-out contract: POST /inference/v1/generate (a server started with --enable-scale-out).

Of vLLM's three ways to get ids it is the one that takes ids, streams them with log-probabilities that carry their own ids,
and says which weights sampled which of them. /v1/completions takes ids too, but names tokens by their text or by a
position, and reports no versions; chat renders the prompt anew.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from polar.completion import VersionSpan
from proxy.engines import checks
from proxy.engines.base import Ask, Sample
from proxy.engines.folding import Folding
from proxy.engines.pool import RETRY_WINDOW, Pool

_PREFIX = "generate-tokens-"  # what the server makes of a request's id


class _Logprob(Struct):
    token_id: int
    logprob: float | None


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Span(Struct):
    version: str
    start: int
    end: int


class _Choice(Struct):
    index: int = 0
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    weight_versions: list[_Span] | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class Chunk(Struct):
    choices: list[_Choice] = field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class VLLM(Pool):
    def __init__(
        self,
        urls: str | list[str],
        context_length: int,
        api_key: str | None = None,
        window: float = RETRY_WINDOW,
        model: str = "",
    ):
        super().__init__(VLLMWire(model), urls, context_length, api_key, window)


class VLLMWire:
    name = "vllm"
    path = "/inference/v1/generate"
    probe = "/health"
    resumable = True
    renders = False
    extras = False

    def __init__(self, model: str = ""):
        self._model = model

    def body(self, ask: Ask, plain: bool = False) -> bytes:
        s = ask.order.sampling
        params: dict[str, Any] = {k: s[k] for k in ("temperature", "top_p", "top_k", "min_p")}
        params["max_tokens"] = ask.limit  # without it the server would take 16
        params["stop_token_ids"] = ask.order.stop_ids
        params["logprobs"] = 0  # of the sampled token alone
        params["skip_special_tokens"] = False
        if s.get("stop"):
            params["stop"] = s["stop"]
        if ask.seed is not None:
            params["seed"] = ask.seed
        if ask.order.schema is not None:
            params["structured_outputs"] = {"json": ask.order.schema} if ask.order.schema else {"json_object": True}
        body = {
            "request_id": ask.rid,
            "token_ids": checks.ids_json(ask.prompt),
            "sampling_params": params,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._model:
            body["model"] = self._model
        return msgspec.json.encode(body)

    def reader(self, ask: Ask) -> Reader:
        return Reader(ask)

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        # Asked for by name, the stream still ends in order, with the versions of what was sampled.
        return "/inference/v1/abort_requests", msgspec.json.encode({"request_ids": [_PREFIX + rid]})


class Reader(Folding[Chunk]):
    """Chunks, each of which carries only what is new."""

    def __init__(self, ask: Ask) -> None:
        super().__init__(_decoder, Chunk, ask.order.vocabulary)
        self._order = ask.order
        self._finish: str | None = None
        self._matched: int | str | None = None
        self._pairs: list[tuple[Any, Any]] = []
        self._spans: list[_Span] = []
        self._counted: int | None = None

    @property
    def ended(self) -> bool:
        return self._finish is not None

    def take(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            self._counted = chunk.usage.completion_tokens
            details = chunk.usage.prompt_tokens_details
            self._cached = (details.cached_tokens if details is not None else None) or self._cached
            if self._finish is not None and self._counted not in (None, len(self.ids)):
                self.fault = f"{self._counted} tokens counted, {len(self.ids)} sent"
        for choice in chunk.choices:
            new = choice.token_ids or []
            if choice.index != 0 or not checks.ids_exist(new) or (self._finish is not None and new):
                self.fault = "tokens that belong to no answer"
                return
            self.ids += new
            content = (choice.logprobs.content if choice.logprobs is not None else None) or []
            self._pairs += [(e.logprob, e.token_id) for e in content]
            self._finish = choice.finish_reason or self._finish
            if choice.stop_reason is not None:
                self._matched = choice.stop_reason
            if choice.weight_versions:
                self._spans = choice.weight_versions

    def sample(self) -> Sample:
        n = len(self.ids)
        end = self._finish if self._finish in ("stop", "length", "abort") else "failed"
        matched = self._matched
        if end == "stop" and matched is None and n and self.ids[-1] in self._order.stop_ids:
            matched = self.ids[-1]  # the model's own end token isn't named
        spans = [VersionSpan(s.version, s.start, s.end) for s in self._spans]
        return self.folded(end, matched, self._pairs, checks.versions(spans, n) if spans else ([], ""))  # type: ignore[arg-type]
