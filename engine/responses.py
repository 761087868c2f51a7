"""The JSON of /generate, as SGLang writes it."""

from __future__ import annotations

import time

from engine.request import Request, View
from engine.tokenizer import Tokenizer


class Renderer:
    """Renders one request's snapshots; with `incremental`, only what the last one didn't hold."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        texts: bool,
        prompt_ids: bool,
        incremental: bool = False,
    ):
        self._request, self._tokenizer = request, tokenizer
        self._texts, self._prompt_ids, self._incremental = texts, prompt_ids, incremental
        self._sent_tokens = self._sent_text = 0

    def render(self, view: View, version: str) -> dict:
        """One response object; `version` is the engine's current weight version."""
        start, end, request = self._sent_tokens, view.tokens, self._request
        answer = {
            "text": view.text[self._sent_text :],
            "output_ids": request.output[start:end],
            "meta_info": self._meta(view, version, start, end),
        }
        if self._prompt_ids:
            answer["prompt_token_ids"] = request.prompt
        if self._incremental:
            self._sent_tokens, self._sent_text = end, len(view.text)
        return answer

    def _meta(self, view: View, version: str, start: int, end: int) -> dict:
        request = self._request
        spans = [[name, first, min(last, end)] for name, first, last in list(request.spans) if first < end]
        spans = spans or [[version, 0, 0]]
        meta = {
            "id": request.rid,
            "finish_reason": view.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": end,
            "cached_tokens": request.cached or 0,
            "cached_tokens_details": {"device": request.cached, "host": 0} if request.cached else None,
            "reasoning_tokens": 0,
            "weight_version": spans[-1][0],
            "num_retractions": request.retractions,
            "dp_rank": None,
        }
        if request.want_logprob:
            self._logprobs(meta, start, end)
        meta["queue_time"] = (request.started or time.time()) - request.created
        meta["forward_entry_time"] = request.started
        meta["prefill_finished_time"] = request.first_token
        if view.finish is not None:
            meta["weight_versions"] = [{"version": name, "start": first, "end": last} for name, first, last in spans]
            meta["e2e_latency"] = (request.finished or time.time()) - request.created
            meta["request_received_ts"] = request.created
            meta["first_token_latency"] = request.first_token and request.first_token - request.created
            meta["request_finished_ts"] = request.finished
        meta["response_sent_to_client_ts"] = time.time()
        return meta

    def _logprobs(self, meta: dict, start: int, end: int) -> None:
        request = self._request
        meta["output_token_logprobs"] = [
            [logprob, token, self._text(token)]
            for logprob, token in zip(request.logprobs[start:end], request.output[start:end], strict=True)
        ]
        meta["output_token_logprobs_length"] = end
        known = len(request.input_logprobs)
        prompt = request.prompt[request.logprob_start : request.logprob_start + known]
        meta["input_token_logprobs"] = [
            [logprob, token, self._text(token)]
            for logprob, token in zip(request.input_logprobs[:known], prompt, strict=True)
        ]
        if request.top:
            meta["output_top_logprobs"] = [self._alternatives(row) for row in request.tops[start:end]]
            meta["input_top_logprobs"] = [row and self._alternatives(row) for row in request.input_tops[:known]]
        if request.probe_ids:
            meta["output_token_ids_logprobs"] = [self._alternatives(row) for row in request.probes[start:end]]
            meta["input_token_ids_logprobs"] = [row and self._alternatives(row) for row in request.input_probes[:known]]

    def _alternatives(self, row: list[tuple[float, int]]) -> list[list]:
        return [[logprob, token, self._text(token)] for logprob, token in row]

    def _text(self, token: int) -> str | None:
        return self._tokenizer.decode([token], skip_special_tokens=False) if self._texts else None
