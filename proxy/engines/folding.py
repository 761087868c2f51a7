"""What the readers of token streams share: chunks to one Sample, and when to believe no more of them."""

from __future__ import annotations

import time
from typing import Any, Generic, TypeVar

import msgspec

from polar.completion import VersionSpan
from proxy.engines import checks
from proxy.engines.base import End, Sample

C = TypeVar("C")


class Folding(Generic[C]):
    """`ids` grow; `error` is the server's own word for a failure, `fault` ours for an answer that breaks the contract."""

    def __init__(self, decoder: msgspec.json.Decoder[C], chunk: type[C], vocabulary: int) -> None:
        self.ids: list[int] = []
        self.error: Any = None
        self.fault = ""
        self._decoder, self._chunk, self._vocabulary = decoder, chunk, vocabulary
        self._cached = 0
        self._first_token_at = 0.0

    @property
    def ended(self) -> bool:
        """The server told how the sample ended."""
        raise NotImplementedError

    def take(self, chunk: C) -> None:
        raise NotImplementedError

    def skips(self, behind: int) -> bool:
        """Whether an event needs no decoding, since `behind` more have arrived with it."""
        return False

    @property
    def done(self) -> bool:
        return self.ended or self.error is not None or bool(self.fault)

    @property
    def begun(self) -> bool:
        return bool(self.ids)

    def read(self, data: list[bytes]) -> list[int]:
        """The ids that are new."""
        data = [e for e in data if e != b"[DONE]"]
        before = len(self.ids)
        for at, raw in enumerate(data):
            if self.skips(len(data) - 1 - at):
                continue
            chunk = checks.decode(raw, self._decoder, self._chunk)
            error = getattr(chunk, "error", None)
            if chunk is None:
                self.fault = self.fault or "an event that is not of the contract's shape"
            elif error is not None:
                self.error = error
            elif not self.fault:
                self.take(chunk)
            if self.fault or self.error is not None:
                break
        if self.ids and not self._first_token_at:
            self._first_token_at = time.time()
        return self.ids[before:]

    def folded(
        self,
        end: End,
        matched: int | str | None,
        pairs: list[tuple[Any, Any]],
        versions: tuple[list[VersionSpan], str],
    ) -> Sample:
        """The sample, or as much of it as may be believed. `pairs` are (logprob, id); `versions` the spans, or why not."""
        logprobs, unfit = checks.logprobs(pairs, self.ids)
        spans, unknown = versions
        broken = "engine_protocol" if self.fault else ""
        untrainable = broken or checks.vocabulary(self.ids, self._vocabulary) or unfit or unknown
        return Sample(
            ids=self.ids,
            logprobs=[] if untrainable else logprobs,
            versions=spans,
            untrainable=untrainable,
            end=end,
            stop_matched=matched,
            cached_tokens=self._cached,
            first_token_at=self._first_token_at,
        )
