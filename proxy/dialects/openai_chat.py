"""OpenAI Chat Completions. docs/proxy/openai_chat.md says of every field whether it is obeyed, refused, recorded or
ignored."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from proxy.dialects import openai_chat_request, openai_chat_tools, sse
from proxy.dialects.base import Answer, Call, Encoder, ModelCard, Route
from proxy.failures import CallError, bad
from proxy.neutral import Event, Finish, Reasoning, Request, Text, ToolCall, Usage, fold

_encode = msgspec.json.Encoder().encode


class OpenAIChat:
    name = "openai_chat"
    own = re.compile(r"(?:/v1)?/chat/")
    routes = (
        Route("POST", r"(?:/v1)?/chat/completions", "generate"),
        Route("GET", r"(?:/v1)?/models", "models"),
        Route("GET", r"(?:/v1)?/models/(?P<model>.+)", "model"),
    )
    broken: Literal["reset", "end"] = "reset"

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        try:
            return openai_chat_request.parse(body)
        except RecursionError as e:
            raise bad("the request is nested too deeply") from e

    def error(self, error: CallError) -> tuple[int, bytes]:
        kind = {401: "authentication_error", 403: "permission_error"}.get(error.status, "invalid_request_error")
        if error.status >= 500:
            kind = "server_error"
        inner = {"message": error.message, "type": kind, "code": error.code, "param": error.param}
        return error.status, _encode({"error": inner})

    def encoder(self, answer: Answer) -> Encoder:
        return ChunkEncoder(answer)

    def whole(self, answer: Answer, events: list[Event]) -> bytes:
        message, finish = fold(events)
        assert finish is not None
        message.setdefault("refusal", None)
        if message.get("tool_calls"):
            custom = answer.request.extra.get("custom", set())
            message["tool_calls"] = [openai_chat_tools.called(e, custom) for e in events if isinstance(e, ToolCall)]
            message["content"] = message["content"] or None
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish.reason}
        head = {"id": answer.id, "object": "chat.completion", "created": answer.created, "model": answer.model}
        return _encode({**head, "choices": [choice], "usage": _usage(finish.usage)})

    def counted(self, tokens: int) -> bytes:
        return _encode({"input_tokens": tokens})

    def models(self, cards: list[ModelCard]) -> bytes:
        return _encode({"object": "list", "data": [_card(c) for c in cards]})

    def model(self, card: ModelCard) -> bytes:
        return _encode(_card(card))


class ChunkEncoder:
    """Server-sent `chat.completion.chunk` events; a call is sent whole, in one delta."""

    headers = sse.HEADERS

    def __init__(self, answer: Answer):
        self._head = {
            "id": answer.id,
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
        }
        self._with_usage = bool(answer.request.extra.get("include_usage"))
        self._custom = answer.request.extra.get("custom", set())
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        if isinstance(event, Text):
            return self._chunk({"content": event.text})
        if isinstance(event, Reasoning):
            return self._chunk({"reasoning_content": event.text})
        if isinstance(event, ToolCall):
            call = {"index": self._calls, **openai_chat_tools.called(event, self._custom)}
            self._calls += 1
            return self._chunk({"tool_calls": [call]})
        return self._last(event)

    def heartbeat(self) -> bytes:
        return self._chunk({})

    def _last(self, finish: Finish) -> bytes:
        out = self._chunk({}, finish.reason)
        if self._with_usage:
            out += sse.data({**self._head, "choices": [], "usage": _usage(finish.usage)})
        return out + b"data: [DONE]\n\n"

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> bytes:
        return sse.data(
            {**self._head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}]}
        )


def _usage(u: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": u.prompt_tokens,
        "completion_tokens": u.sampled_tokens,
        "total_tokens": u.prompt_tokens + u.sampled_tokens,
        "prompt_tokens_details": {"cached_tokens": u.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": u.reasoning_tokens},
    }


def _card(card: ModelCard) -> dict[str, Any]:
    head = {"id": card.name, "object": "model", "created": 0, "owned_by": "polar"}
    return {**head, "context_length": card.context_length, "max_model_len": card.context_length}
