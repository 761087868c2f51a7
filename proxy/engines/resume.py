"""One completion out of the pieces an engine gave of it, when it was interrupted and taken up again from its own ids."""

from __future__ import annotations

import numpy as np

from polar import arrays
from polar.completion import VersionSpan
from proxy.engines.base import Ask, Order, Sample

MAX_RESUMES = 32
_APART = 0x9E3779B1  # the seeds of a completion's pieces: the same one would repeat the same draws


class Joined:
    """`ids` is what was sampled so far: the context of the next piece, exactly."""

    def __init__(self, order: Order, resumable: bool):
        self.ids: list[int] = []
        self.resumed = 0
        self._order = order
        # A grammar can't be taken up in the middle.
        self._resumable = resumable and order.schema is None
        self._asked = 0
        self._piece: list[int] = []
        self._pieces: list[Sample] = []
        self._cut: tuple[int, str] | None = None
        self._stops: list[str] = order.sampling.get("stop") or []
        self._border = False  # a stop string may still reach over the last interruption

    @property
    def asked(self) -> bool:
        """A server was asked for it before, whatever came of that."""
        return self._asked > 0

    @property
    def begun(self) -> bool:
        return bool(self._pieces)

    @property
    def left(self) -> int:
        return self._order.sampling["max_new_tokens"] - len(self.ids)

    def ask(self) -> Ask:
        """The request for all that is missing. Each gets an id of its own: an engine may still hold the one before."""
        order, n = self._order, self._asked
        self._asked += 1
        self._piece = []
        self._border = bool(self.ids and self._stops and order.decode is not None)
        seed = order.sampling.get("seed")
        if seed is not None and self._pieces:
            seed = (seed + _APART * len(self._pieces)) & 0x7FFFFFFF
        prompt = np.concatenate([order.prompt, arrays.ids(self.ids)]) if self.ids else order.prompt
        rid = f"{order.rid}-{n}" if n else order.rid
        return Ask(order=order, rid=rid, prompt=prompt, limit=self.left, seed=seed, tokens=self._tokens)

    def add(self, sample: Sample) -> bool:
        """Take a piece; whether to ask for the rest."""
        if self._cut is not None:
            n, stop = self._cut
            sample.ids, sample.logprobs = sample.ids[:n], sample.logprobs[:n]
            sample.versions = [
                VersionSpan(v.version, v.start, min(v.end, n)) for v in sample.versions if v.start < min(v.end, n)
            ]
            sample.end, sample.stop_matched = "stop", stop
        self.ids = self.ids + sample.ids
        self._pieces.append(sample)
        if sample.end not in ("abort", "failed") or not self.ids or self._order.cancel.is_set():
            return False
        if sample.untrainable == "engine_protocol" or not self._resumable or self.resumed >= MAX_RESUMES:
            return False
        if self.ids[-1] in self._order.stop_ids:  # only the word of its end was lost
            sample.end, sample.stop_matched = "stop", self.ids[-1]
            return False
        if self.left < 1:
            sample.end = "length"
            return False
        self.resumed += 1
        return True

    def sample(self) -> Sample:
        first, last = self._pieces[0], self._pieces[-1]
        if len(self._pieces) == 1:
            return first
        logprobs: list[float] = []
        spans: list[VersionSpan] = []
        untrainable, at = "", 0
        for piece in self._pieces:
            untrainable = untrainable or piece.untrainable
            if piece.ids and bool(piece.versions) != bool(first.versions):
                untrainable = untrainable or "versions_unknown"
            logprobs += piece.logprobs
            for v in piece.versions:
                if spans and spans[-1].version == v.version and spans[-1].end == at + v.start:
                    spans[-1] = VersionSpan(v.version, spans[-1].start, at + v.end)
                else:
                    spans.append(VersionSpan(v.version, at + v.start, at + v.end))
            at += len(piece.ids)
        return Sample(
            ids=self.ids,
            logprobs=[] if untrainable else logprobs,
            versions=[] if untrainable == "versions_unknown" else spans,
            untrainable=untrainable,
            end=last.end,
            stop_matched=last.stop_matched,
            cached_tokens=first.cached_tokens,
            first_token_at=first.first_token_at,
            resumed=self.resumed,
        )

    def _tokens(self, new: list[int]) -> bool:
        """Pass on what was sampled, up to a stop string that began before the interruption: the engine can't see it."""
        if self._cut is not None:
            return True
        if not self._border:
            self._order.tokens(new)
            return False
        start = len(self._piece)
        self._piece += new
        self._look(start)
        self._order.tokens(new if self._cut is None else new[: self._cut[0] - start])
        return self._cut is not None

    def _look(self, start: int) -> None:
        decode, longest = self._order.decode, max(map(len, self._stops))
        assert decode is not None
        # A character may take several tokens.
        before = self.ids[-4 * longest - 8 :]
        border = len(decode(before).rstrip("\ufffd"))
        for n in range(start + 1, len(self._piece) + 1):
            text = decode(before + self._piece[:n])
            found = [(s, at) for s in self._stops if (at := text.find(s, max(0, border - len(s) + 1))) >= 0]
            if any(at < border for _, at in found):
                self._cut = (n, found[0][0])  # an engine takes the first of its list, wherever it begins
                return
            if len(text.rstrip("\ufffd")) >= border + longest - 1:
                self._border = False
                return
