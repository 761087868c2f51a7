"""OpenAI Chat Completions.

Left out on purpose: `logprobs` is accepted and answered with null (the captured ones are the trainer's); `tool_choice`
"required" or a named tool is recorded but not forced, since forcing would sample from another distribution; a malformed
tool call in the sample is answered as plain text; images and audio are refused.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from proxy.dialects import fields, sse
from proxy.dialects.base import Answer, Call, Encoder, ModelCard, Route
from proxy.failures import CallError, bad
from proxy.neutral import Event, Finish, Message, Reasoning, Request, Text, ToolCall, ToolChoice, Usage, fold

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_WISHES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "logit_bias": "logit_bias",
    "tool_choice": "tool_choice",
    "parallel_tool_calls": "parallel_tool_calls",
    "reasoning_effort": "reasoning_effort",
}
_encode = msgspec.json.Encoder().encode


class OpenAIChat:
    name = "openai_chat"
    routes = (
        Route("POST", r"(?:/v1)?/chat/completions", "generate"),
        Route("GET", r"(?:/v1)?/models", "models"),
        Route("GET", r"(?:/v1)?/models/(?P<model>.+)", "model"),
    )
    broken: Literal["reset", "end"] = "reset"

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        if (n := fields.count(body, "n")) is not None and n != 1:
            raise bad(f"'n' is {n}, only 1 is supported: sample again instead", "n")
        _refuse_format(body.get("response_format"))
        if body.get("functions"):
            raise bad("'functions' is not supported: use 'tools'", "functions")
        messages = [_message(m, i) for i, m in enumerate(fields.items(body, "messages"))]
        if not messages:
            raise bad("'messages' must have at least one message", "messages")
        limit = fields.count(body, "max_completion_tokens") or fields.count(body, "max_tokens")
        wishes = fields.wishes(body, _WISHES)
        stop = _stop(body.get("stop"))
        if limit is not None:
            wishes["max_tokens"] = limit
        if stop:
            wishes["stop"] = stop
        options = body.get("stream_options")
        usage = fields.flag(fields.obj(options, "stream_options"), "include_usage") if options is not None else False
        same = {k: v for k, v in body.items() if k not in ("stream", "stream_options")}
        return Request(
            model=fields.text(body, "model", ""),
            messages=messages,
            tools=[_tool(t, i) for i, t in enumerate(fields.items(body, "tools"))],
            tool_choice=_choice(body.get("tool_choice")),
            wishes=wishes,
            max_tokens=limit,
            stop=stop,
            stream=fields.flag(body, "stream"),
            identity=_encode(same),
            extra={"include_usage": usage},
        )

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
        if message.get("tool_calls") and not message["content"]:
            message["content"] = None
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
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def event(self, event: Event) -> bytes:
        if isinstance(event, Text):
            return self._chunk({"content": event.text})
        if isinstance(event, Reasoning):
            return self._chunk({"reasoning_content": event.text})
        if isinstance(event, ToolCall):
            call = {
                "index": self._calls,
                "id": event.id,
                "type": "function",
                "function": {"name": event.name, "arguments": event.arguments},
            }
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
    }


def _card(card: ModelCard) -> dict[str, Any]:
    head = {"id": card.name, "object": "model", "created": 0, "owned_by": "polar"}
    return {**head, "context_length": card.context_length, "max_model_len": card.context_length}


def _message(raw: Any, i: int) -> Message:
    where = f"messages[{i}]"
    m = fields.obj(raw, where)
    role = _ROLES.get(m.get("role"))  # type: ignore[arg-type]
    if role is None:
        raise bad(f"{where}.role is {m.get('role')!r:.40}, allowed: {', '.join(_ROLES)}", f"{where}.role")
    out: Message = {"role": role, "content": _content(m.get("content"), f"{where}.content")}
    if role == "tool":
        out["tool_call_id"] = fields.text(m, "tool_call_id", "")
        if isinstance(m.get("name"), str):
            out["name"] = m["name"]
    if role == "assistant":
        for name in ("reasoning_content", "reasoning"):
            if isinstance(m.get(name), str) and m[name]:
                out["reasoning_content"] = m[name]
                break
        calls = [_tool_call(c, f"{where}.tool_calls[{j}]") for j, c in enumerate(fields.items(m, "tool_calls"))]
        if calls:
            out["tool_calls"] = calls
    return out


def _content(value: Any, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(f"'{where}' must be a string or a list of parts", where)
    texts = []
    for j, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        part = fields.obj(part, f"{where}[{j}]")
        kind = part.get("type")
        if kind in ("text", "input_text", "output_text", "refusal"):
            texts.append(fields.text(part, "refusal" if kind == "refusal" else "text"))
        else:
            raise bad(f"{where}[{j}] has type {kind!r:.40}; this model reads text only", where, "unsupported_content")
    return "".join(texts)


def _tool_call(raw: Any, where: str) -> dict[str, Any]:
    c = fields.obj(raw, where)
    function = fields.obj(c.get("function"), f"{where}.function")
    arguments = function.get("arguments", "{}")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    inner = {"name": fields.text(function, "name"), "arguments": arguments}
    return {"id": fields.text(c, "id", ""), "type": "function", "function": inner}


def _tool(raw: Any, i: int) -> dict[str, Any]:
    where = f"tools[{i}]"
    t = fields.obj(raw, where)
    if t.get("type", "function") != "function":
        raise bad(f"{where}.type is {t['type']!r:.40}; only 'function' tools can be offered to this model", where)
    function = fields.obj(t.get("function"), f"{where}.function")
    inner: dict[str, Any] = {"name": fields.text(function, "name")}
    inner["description"] = fields.text(function, "description", "")
    # Some harnesses leave out the schema of a tool without parameters; templates expect one.
    inner["parameters"] = function.get("parameters") or {"type": "object", "properties": {}}
    return {"type": "function", "function": inner}


def _choice(value: Any) -> ToolChoice:
    if value in (None, "auto"):
        return "auto"
    if value in ("none", "required"):
        return value
    if isinstance(value, dict):
        return "required"
    raise bad(f"'tool_choice' is {value!r:.40}, allowed: auto, none, required, or a named function", "tool_choice")


def _stop(value: Any) -> list[str]:
    values = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(values, list) or not all(isinstance(s, str) for s in values):
        raise bad("'stop' must be a string or a list of strings", "stop")
    if len(values) > 16 or any(len(s) > 500 for s in values):
        raise bad("'stop' may have at most 16 strings of at most 500 characters", "stop")
    return [s for s in values if s]


def _refuse_format(value: Any) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if kind not in (None, "text"):
        raise bad(
            f"response_format {kind!r:.40} is not supported: constrained decoding would sample from another distribution"
            " than the policy's",
            "response_format",
            "unsupported_response_format",
        )
