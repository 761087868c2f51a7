"""SGLang's /generate: its request, and its stream of chunks that carry everything so far, or only what is new."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct, field

from polar.completion import VersionSpan
from proxy.engines import checks
from proxy.engines.base import Ask, Sample
from proxy.engines.folding import Folding


class _Span(Struct):
    version: str
    start: int
    end: int


class _Meta(Struct):
    finish_reason: dict[str, Any] | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[Any, ...]] | None = None


class Chunk(Struct):
    output_ids: list[int] = field(default_factory=list)
    meta_info: _Meta = field(default_factory=_Meta)
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)


class SGLangWire:
    name = "sglang"
    path = "/generate"
    probe = "/model_info"
    resumable = True
    renders = False
    extras = False

    def body(self, ask: Ask, plain: bool = False) -> bytes:
        s = ask.order.sampling
        params: dict[str, Any] = {k: s[k] for k in ("temperature", "top_p", "top_k", "min_p")}
        params["max_new_tokens"] = ask.limit
        params["stop_token_ids"] = ask.order.stop_ids
        # The proxy decodes ids itself; this only keeps the engine from matching stop strings on altered text.
        params["skip_special_tokens"] = False
        if s.get("stop"):
            params["stop"] = s["stop"]
        if ask.seed is not None:
            params["sampling_seed"] = ask.seed
        if ask.order.schema is not None:
            params["json_schema"] = msgspec.json.encode(ask.order.schema or {"type": "object"}).decode()
        body = {
            "rid": ask.rid,
            "input_ids": checks.ids_json(ask.prompt),
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
        }
        return msgspec.json.encode(body)

    def reader(self, ask: Ask) -> Reader:
        return Reader(ask.order.vocabulary)

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        # SGLang aborts every request whose id begins with this one: ours have one length, but for the retries of a rid.
        return "/abort_request", msgspec.json.encode({"rid": rid})


class Reader(Folding[Chunk]):
    """Chunks that carry everything so far, or only what is new."""

    def __init__(self, vocabulary: int = 0) -> None:
        super().__init__(_decoder, Chunk, vocabulary)
        self.finish: dict[str, Any] | None = None
        self._logprobs: list[tuple[Any, ...]] = []
        self._spans: list[_Span] | None = None
        self._seen_versions: list[str] = []
        self._cumulative = False

    @property
    def ended(self) -> bool:
        return self.finish is not None

    def skips(self, behind: int) -> bool:
        return self._cumulative and behind > 0

    def take(self, chunk: Chunk) -> None:
        meta, have, new = chunk.meta_info, len(self.ids), chunk.output_ids
        total = meta.completion_tokens if meta.completion_tokens is not None else have if not new else -1
        if self.finish is not None:
            if new and (len(new) != have or new != self.ids):
                self.fault = "tokens after the end"
            return
        if have and len(new) == total:
            self._cumulative = True
            grown, fits = new[have:], new[:have] == self.ids
        else:
            grown, fits = new, have + len(new) == total
        if not fits or not checks.ids_exist(grown):
            self.fault = "ids that don't follow from the ones before"
            return
        self.ids += grown
        logprobs = meta.output_token_logprobs or []
        if self._cumulative or len(logprobs) == len(self.ids):
            self._logprobs = logprobs or self._logprobs
        else:
            self._logprobs += logprobs
        if meta.weight_version is not None and meta.weight_version not in self._seen_versions and self.ids:
            self._seen_versions.append(meta.weight_version)
        self._spans = meta.weight_versions or self._spans
        self._cached = meta.cached_tokens if meta.cached_tokens is not None else self._cached
        self.finish = meta.finish_reason
        if self.finish and self.finish.get("status_code") and not self.ids:
            self.error = self.finish  # refused: not an answer without tokens

    def sample(self) -> Sample:
        kind = (self.finish or {}).get("type", "failed")
        matched = (self.finish or {}).get("matched")
        return self.folded(
            kind if kind in ("stop", "length", "abort") else "failed",
            matched if isinstance(matched, (int, str)) else None,
            [(e[0], e[1]) if len(e) > 1 else (None, None) for e in self._logprobs],
            self._versions(),
        )

    def _versions(self) -> tuple[list[VersionSpan], str]:
        """One version seen throughout is one span; several without known borders can't be told apart."""
        n = len(self.ids)
        if not n:
            return [], ""
        if self._spans:
            return checks.versions([VersionSpan(s.version, s.start, s.end) for s in self._spans], n)
        if len(self._seen_versions) > 1:
            return [], "versions_unknown"
        return [VersionSpan(v, 0, n) for v in self._seen_versions], ""
