"""Any OpenAI-compatible server: POST /v1/chat/completions, streamed. The server renders and parses; what it says of token
ids is taken over only if all of it fits together."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
from msgspec import Struct, field

from proxy.engines import checks
from proxy.engines.base import Ask, Sample
from proxy.engines.pool import RETRY_WINDOW, Pool
from proxy.neutral import Event, Message, Reasoning, Text, ToolCall, fold

_NAMED = "token_id:"  # how a server that was asked to names a token by its id


class _Function(Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprob(Struct):
    token: str
    logprob: float | None


class _Logprobs(Struct):
    content: list[_Logprob] | None = None


class _Choice(Struct):
    index: int = 0
    delta: _Delta = field(default_factory=_Delta)
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    stop_reason: int | str | None = None


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class Chunk(Struct):
    choices: list[_Choice] = field(default_factory=list)
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(Chunk)
_ENDS = {"stop": "stop", "tool_calls": "stop", "function_call": "stop", "content_filter": "stop", "length": "length"}


class OpenAI(Pool):
    def __init__(
        self,
        urls: str | list[str],
        context_length: int,
        api_key: str | None = None,
        window: float = RETRY_WINDOW,
        model: str = "default",
    ):
        bases = [u.rstrip("/").removesuffix("/v1") for u in ([urls] if isinstance(urls, str) else urls)]
        super().__init__(OpenAIWire(model), bases, context_length, api_key, window)


class OpenAIWire:
    name = "openai"
    path = "/v1/chat/completions"
    probe = "/v1/models"
    resumable = False
    renders = True
    extras = True

    def __init__(self, model: str):
        self._model = model

    def body(self, ask: Ask, plain: bool = False) -> bytes:
        order, s = ask.order, ask.order.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_message(m, plain) for m in order.messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": ask.limit,
            "temperature": s["temperature"],
            "top_p": s["top_p"],
        }
        if order.tools:
            body["tools"], body["tool_choice"] = order.tools, order.tool_choice
        if s.get("stop"):
            body["stop"] = s["stop"]
        if ask.seed is not None:
            body["seed"] = ask.seed
        if order.schema is not None:
            named = {"name": "answer", "schema": order.schema}
            body["response_format"] = (
                {"type": "json_schema", "json_schema": named} if order.schema else {"type": "json_object"}
            )
        if s["top_k"] != -1:
            body["top_k"] = s["top_k"]
        if s["min_p"] != 0.0:
            body["min_p"] = s["min_p"]
        if not plain:
            body |= {"logprobs": True, "return_token_ids": True, "return_tokens_as_token_ids": True}
        return msgspec.json.encode(body)

    def reader(self, ask: Ask) -> Reader:
        return Reader(ask)

    def abort(self, rid: str) -> tuple[str, bytes] | None:
        return None


class Reader:
    """Folds chunks into events. Calls are passed on when the answer has ended: text may still come between them."""

    def __init__(self, ask: Ask) -> None:
        self.error: Any = None
        self.fault = ""
        self._order, self._rid = ask.order, ask.rid
        self._events: list[Event] = []
        self._calls: dict[int, tuple[str, str, str]] = {}  # id, name, arguments
        self._ids: list[int] = []
        self._pairs: list[tuple[Any, Any]] = []
        self._prompt: list[int] | None = None
        self._usage = _Usage()
        self._finish: str | None = None
        self._matched: int | str | None = None
        self._first_at = 0.0

    @property
    def done(self) -> bool:
        return self._finish is not None or self.error is not None or bool(self.fault)

    @property
    def begun(self) -> bool:
        return bool(self._events or self._calls or self._ids or self._finish)

    def read(self, data: list[bytes]) -> list[int]:
        fresh: list[Event] = []
        for raw in data:
            if raw == b"[DONE]":
                continue
            chunk = checks.decode(raw, _decoder, Chunk)
            if chunk is None:
                self.fault = "an event that is not of the contract's shape"
            elif chunk.error is not None:
                self.error = chunk.error
            else:
                self._take(chunk, fresh)
            if self.fault or self.error is not None:
                break
        if fresh:
            self._events += fresh
            self._first_at = self._first_at or time.time()
            self._order.events(fresh)
        return []

    def _take(self, chunk: Chunk, fresh: list[Event]) -> None:
        self._usage = chunk.usage or self._usage
        if chunk.prompt_token_ids is not None:
            self._prompt = chunk.prompt_token_ids
        for choice in chunk.choices:
            d = choice.delta
            reasoning, text = d.reasoning_content or d.reasoning, d.content or d.refusal
            if choice.index != 0 or (self._finish is not None and (reasoning or text or d.tool_calls)):
                self.fault = "text that belongs to no answer"
                return
            if reasoning:
                fresh.append(Reasoning(reasoning))
            if text:
                fresh.append(Text(text))
            for c in d.tool_calls or ():
                self._call(c)
            self._ids += choice.token_ids or []
            for e in (choice.logprobs.content if choice.logprobs is not None else None) or ():
                self._pairs.append((e.logprob, _named(e.token)))
            self._finish = choice.finish_reason or self._finish
            self._matched = choice.stop_reason if choice.stop_reason is not None else self._matched

    def _call(self, c: _Call) -> None:
        known = self._calls.get(c.index, ("", "", ""))
        f = c.function or _Function()
        self._calls[c.index] = (known[0] or c.id or "", known[1] or f.name or "", known[2] + (f.arguments or ""))

    def sample(self) -> Sample:
        end = _ENDS.get(self._finish or "", "failed")
        # A stream that closed after an error or a fault must not pass for an answer.
        if self.fault or self.error is not None:
            end = "failed"
        last = self._ended() if end != "failed" else []
        if last:
            self._events += last
            self._order.events(last)
        message, _ = fold(self._events)
        ids, logprobs, untrainable = self._tokens()
        details = self._usage.prompt_tokens_details
        return Sample(
            ids=ids,
            logprobs=logprobs,
            untrainable=untrainable,
            end=end,  # type: ignore[arg-type]
            stop_matched=self._matched,
            cached_tokens=(details.cached_tokens if details is not None else None) or 0,
            first_token_at=self._first_at,
            message=message,
            prompt=self._prompt if ids else None,
            prompt_tokens=self._usage.prompt_tokens,
            sampled_tokens=self._usage.completion_tokens,
        )

    def _ended(self) -> list[Event]:
        out: list[Event] = []
        for at, (call_id, name, arguments) in sorted(self._calls.items()):
            if name and _is_object(arguments or "{}"):
                out.append(ToolCall(call_id or f"call_{self._rid[2:]}_{at}", name, arguments or "{}"))
            else:  # what is no call is text, as with the proxy's own parser
                out.append(Text(f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}'))
        return sorted(out, key=lambda e: isinstance(e, ToolCall))

    def _tokens(self) -> tuple[list[int], list[float], str]:
        """The sampled ids with their log-probabilities, if the server told all of both."""
        counted = self._usage.completion_tokens
        whole = bool(self._ids) and self._prompt and counted == len(self._ids) and not self.fault
        if not whole or not checks.ids_exist(self._ids) or not checks.ids_exist(self._prompt or []):
            return [], [], "token_ids_missing"
        logprobs, untrainable = checks.logprobs(self._pairs, self._ids)
        return self._ids, logprobs, untrainable


def _message(m: Message, plain: bool) -> Message:
    known = ["role", "content", "tool_calls", "tool_call_id", "name"]
    return {k: m[k] for k in (known if plain else [*known, "reasoning_content"]) if k in m}


def _named(token: str) -> int | None:
    rest = token.removeprefix(_NAMED)
    return int(rest) if token != rest and rest.isascii() and rest.isdigit() else None


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
