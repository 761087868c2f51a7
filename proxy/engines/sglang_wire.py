"""Reading SGLang's /generate stream: chunks that carry everything so far, or only what is new."""

from __future__ import annotations

import math
import time
from typing import Any

import msgspec
from msgspec import Struct, field

from polar.completion import VersionSpan
from proxy.engines.base import Sample


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


_decode = msgspec.json.Decoder(Chunk).decode


class Events:
    """Splits a byte stream into the data of its server-sent events."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0

    def push(self, data: bytes) -> list[bytes]:
        self._buffer += data
        out = []
        while (at := self._buffer.find(b"\n\n", max(0, self._scanned - 1))) >= 0:
            for line in bytes(self._buffer[:at]).split(b"\n"):
                if line.startswith(b"data:"):
                    out.append(line[5:].strip())
            del self._buffer[: at + 2]
            self._scanned = 0
        self._scanned = len(self._buffer)
        return out


class Reader:
    """Folds chunks into a Sample. `done` after a chunk with a finish reason."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.error: Any = None
        self.finish: dict[str, Any] | None = None
        self.first_token_at = 0.0
        self._logprobs: list[tuple[Any, ...]] = []
        self._spans: list[_Span] | None = None
        self._seen_versions: list[str] = []
        self._cached = 0
        self._broken = ""
        self._cumulative = False

    @property
    def done(self) -> bool:
        return self.finish is not None or self.error is not None

    def read(self, events: list[bytes]) -> list[int]:
        """The ids that are new. Of cumulative chunks that arrived together only the last needs decoding."""
        data = [e for e in events if e != b"[DONE]"]
        before = len(self.ids)
        for at, raw in enumerate(data):
            if self._cumulative and at < len(data) - 1:
                continue
            try:
                chunk = _decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self._broken = self._broken or "engine_protocol"
                continue
            if chunk.error is not None:
                self.error = chunk.error
                break
            self._take(chunk)
        if self.ids and not self.first_token_at:
            self.first_token_at = time.time()
        return self.ids[before:]

    def _take(self, chunk: Chunk) -> None:
        meta, have = chunk.meta_info, len(self.ids)
        new = chunk.output_ids
        total = meta.completion_tokens if meta.completion_tokens is not None else len(new)
        if have and len(new) == total:
            self._cumulative = True
            if new[:have] != self.ids:
                self._broken = "engine_protocol"
            self.ids += new[have:]
        elif have + len(new) == total:
            self.ids += new
        else:
            self._broken = "engine_protocol"
            self.ids += new[have:] if len(new) > have else []
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
        logprobs, untrainable = self._checked_logprobs()
        versions, unknown = self._checked_versions()
        untrainable = self._broken or untrainable or unknown
        return Sample(
            ids=self.ids,
            logprobs=[] if untrainable else logprobs,
            versions=versions,
            untrainable=untrainable,
            end=kind if kind in ("stop", "length", "abort") else "failed",
            stop_matched=matched if isinstance(matched, (int, str)) else None,
            cached_tokens=self._cached,
            first_token_at=self.first_token_at,
        )

    def _checked_logprobs(self) -> tuple[list[float], str]:
        if len(self._logprobs) != len(self.ids):
            return [], "logprob_mismatch" if self._logprobs else "logprobs_missing"
        out = []
        for entry, t in zip(self._logprobs, self.ids, strict=True):
            if len(entry) < 2 or entry[1] != t:
                return [], "logprob_mismatch"
            if not isinstance(entry[0], (int, float)) or not math.isfinite(entry[0]):
                return [], "logprob_not_finite"
            out.append(float(entry[0]))
        return out, ""

    def _checked_versions(self) -> tuple[list[VersionSpan], str]:
        """Spans that cover all tokens without a gap. One version seen throughout is one span; several without known
        borders can't be told apart."""
        n = len(self.ids)
        if not n:
            return [], ""
        if self._spans:
            spans = [
                VersionSpan(s.version, s.start, min(s.end, n)) for s in self._spans if s.start < n and s.end > s.start
            ]
            borders = [0, *(s.end for s in spans)]
            if all(s.start == b for s, b in zip(spans, borders, strict=False)) and borders[-1] == n:
                return spans, ""
            return [], "versions_mismatch"
        if len(self._seen_versions) > 1:
            return [], "versions_unknown"
        return [VersionSpan(v, 0, n) for v in self._seen_versions], ""
