"""Anthropic Messages, as Claude Code and the official SDKs speak it. docs/proxy/anthropic.md lists every field."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from proxy.dialects import anthropic_events, anthropic_messages, anthropic_tools, fields
from proxy.dialects.anthropic_blocks import Reader
from proxy.dialects.base import Answer, Call, Encoder, ModelCard, Route
from proxy.failures import CallError, bad
from proxy.neutral import Event, Request

_encode = msgspec.json.Encoder().encode

_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
_RECORDED = ("tool_choice", "thinking", "context_management", "service_tier", "speed")
# Neither the model nor the sample depends on these.
_IGNORED = {
    "stream",
    "metadata",
    "cache_control",
    "betas",
    "anthropic_beta",
    "anthropic_version",
    "container",
    "diagnostics",
    "billing_policy",
    "fallbacks",
    "fallback_credit_token",
    "inference_geo",
    "user_profile_id",
    "workspace_id",
}
_READ = {"model", "messages", "system", "tools", "max_tokens", "stop_sequences", "output_config", "output_format"}
_KNOWN = {*_READ, *_IGNORED, *_RECORDED, *_SAMPLING, "mcp_servers"}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
}


class Anthropic:
    name = "anthropic"
    own = re.compile(r"(?:/v1)?/messages(?:/|$)")
    routes = (
        Route("POST", r"(?:/v1)?/messages", "generate"),
        Route("POST", r"(?:/v1)?/messages/(?P<counted>count_tokens)", "count"),
        Route("GET", r"(?:/v1)?/models", "models", ("anthropic-version",)),
        Route("GET", r"(?:/v1)?/models/(?P<model>.+)", "model", ("anthropic-version",)),
    )
    broken: Literal["reset", "end"] = "reset"

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        for name, code, why in (
            # At this code the SDKs' tool runners, which try a thread first, go on without one.
            ("thread", "thread_unsupported_request", "no conversation is kept here: send it whole"),
            ("compaction", "unsupported_compaction", "send the summarising prompt as a message"),
        ):
            if body.get(name) is not None:
                raise bad(f"'{name}' is not supported: {why}", name, code)
        tools = anthropic_tools.parse(fields.items(body, "tools"))
        reader = Reader(tools=tools)
        raw = fields.items(body, "messages")
        messages = anthropic_messages.system(body.get("system"), reader) + anthropic_messages.messages(raw, reader)
        if not raw:
            raise bad("'messages' must have at least one message", "messages")
        limit = fields.count(body, "max_tokens")
        if "counted" not in call.params:
            if limit is None:
                raise bad("'max_tokens' is required", "max_tokens")
            if raw[-1]["role"] == "assistant":
                raise bad(
                    "the last of 'messages' is the assistant's: continuing a given beginning is not supported",
                    "messages",
                    "unsupported_prefill",
                )
        stop = fields.stops(body, "stop_sequences")
        wishes, schema = _wishes(body, tools, limit, stop)
        request = Request(
            model=fields.text(body, "model", ""),
            messages=messages,
            tools=tools.offered,
            later_tools=tools.deferred,
            tool_choice=anthropic_tools.choice(body.get("tool_choice"), tools),
            wishes=wishes,
            max_tokens=limit,
            stop=stop,
            stream=fields.flag(body, "stream"),
            images=reader.images,
            schema=schema,
        )
        request.identity = _identity(request)
        return request

    def error(self, error: CallError) -> tuple[int, bytes]:
        kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message
        if error.tokens:
            # Claude Code compacts at these words, by as much as the numbers say.
            message = f"prompt is too long: {error.tokens[0]} tokens > {error.tokens[1]} maximum"
        details = {"error_code": error.code, "param": error.param}
        inner = {"type": kind, "message": message, "details": details}
        return error.status, _encode({"type": "error", "error": inner, "request_id": None})

    def encoder(self, answer: Answer) -> Encoder:
        return anthropic_events.MessageEncoder(answer)

    def whole(self, answer: Answer, events: list[Event]) -> bytes:
        return _encode(anthropic_events.whole(answer, events))

    def counted(self, tokens: int) -> bytes:
        return _encode({"input_tokens": tokens})

    def models(self, cards: list[ModelCard]) -> bytes:
        names = [c.name for c in cards]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return _encode({"data": [_card(c) for c in cards], "has_more": False, **ends})

    def model(self, card: ModelCard) -> bytes:
        return _encode(_card(card))


def _wishes(
    body: dict[str, Any], tools: anthropic_tools.Tools, limit: int | None, stop: list[str]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What is recorded of the body, and the JSON schema that the answer must follow."""
    out = fields.wishes(body, _SAMPLING)
    out |= {name: body[name] for name in _RECORDED if body.get(name) is not None}
    if limit is not None:
        out["max_tokens"] = limit
    if stop:
        out["stop"] = stop
    config = body.get("output_config")
    config = fields.obj(config, "output_config") if config is not None else {}
    if config.get("effort") is not None:
        out["reasoning_effort"] = config["effort"]
    if tools.hosted:
        out["left_out_tools"] = tools.hosted
    if body.get("mcp_servers"):
        # With their addresses come tokens, which belong nowhere.
        out["left_out_mcp_servers"] = len(fields.items(body, "mcp_servers"))
    if unknown := sorted(k for k in body if k not in _KNOWN):
        out["unknown_fields"] = [k[:80] for k in unknown[:20]]
    for name, value in (("output_config.format", config.get("format")), ("output_format", body.get("output_format"))):
        if value is not None:
            return out, _schema(value, name)
    return out, None


def _schema(value: Any, where: str) -> dict[str, Any]:
    given = fields.obj(value, where)
    if given.get("type") != "json_schema":
        raise bad(f"{where}.type is {given.get('type')!r:.40}, allowed: json_schema", f"{where}.type")
    return fields.obj(given.get("schema"), f"{where}.schema")


def _identity(r: Request) -> bytes:
    """All that the answer depends on. Markers that move between retries (cache_control, metadata, billing) are gone."""
    parts = [r.model, r.messages, r.tools, r.tool_choice, r.wishes, r.schema]
    try:
        return _encode(parts)
    except (RecursionError, msgspec.EncodeError, OverflowError, TypeError) as e:
        raise bad("the request is nested too deeply or has a number out of range") from e


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": "1970-01-01T00:00:00Z",
        "lifecycle": "active",
        "max_input_tokens": card.context_length,
        "max_tokens": card.context_length,
    }
