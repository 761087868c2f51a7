"""Google generateContent, streamGenerateContent (server-sent events or one JSON array), countTokens, and the models.

docs/proxy/google.md says of every field whether it is obeyed, refused, recorded or ignored.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from proxy.dialects import fields, google_answer, google_tools
from proxy.dialects.base import Answer, Call, Encoder, ModelCard, Route
from proxy.dialects.google_contents import Conversation
from proxy.dialects.google_names import camel, many
from proxy.failures import CallError, bad
from proxy.neutral import Event, Request

_encode = msgspec.json.Encoder().encode

_VERSION = r"/v1(?:alpha|beta\d?)?"
# Vertex puts projects and publishers before the model; tuned models have a collection of their own.
_MODEL = r"(?:/projects/[^/]+/locations/[^/]+)?(?:/publishers/[^/]+)?/(?:models|tunedModels)/(?:models/)?(?P<model>.+)"
_MARKS = ("x-goog-api-key", "x-goog-api-client", "key")

_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    405: "UNIMPLEMENTED",
    410: "FAILED_PRECONDITION",
    413: "INVALID_ARGUMENT",
    426: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}
# What the rest of the proxy calls a field.
_FIELDS = {"messages": "contents", "response_format": "generationConfig.responseMimeType"}
_TOP = {"contents", "systemInstruction", "tools", "toolConfig", "generationConfig", "model"}
_WISHES = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "thinkingConfig": "thinking",
}
_CONFIG = {
    *_WISHES,
    "candidateCount",
    "maxOutputTokens",
    "stopSequences",
    "responseMimeType",
    "responseSchema",
    "responseJsonSchema",
    "responseModalities",
}
# Not part of what makes two requests the same call.
_VOLATILE = {"labels", "model"}


class Google:
    name = "google"
    own = re.compile(r"/v1(?:alpha|beta\d?)(?:/|$)")
    routes = (
        Route("POST", rf"{_VERSION}{_MODEL}:countTokens", "count"),
        Route("POST", rf"{_VERSION}{_MODEL}:(?P<verb>[A-Za-z]+)", "generate"),
        Route("GET", r"/v1(?:alpha|beta\d?)/models", "models"),
        Route("GET", r"/v1(?:alpha|beta\d?)" + _MODEL, "model"),
        Route("GET", r"(?:/v1)?/models", "models", marks=_MARKS),
        Route("GET", r"(?:/v1)?/models/(?P<model>.+)", "model", marks=_MARKS),
    )
    # Gemini CLI crashes on a reset, and sends a request again whose stream ended without a finish reason.
    broken: Literal["reset", "end"] = "end"

    def parse(self, body: dict[str, Any], call: Call) -> Request:
        try:
            return _request(body, call)
        except RecursionError as e:
            raise bad("the request is nested too deeply") from e

    def error(self, error: CallError) -> tuple[int, bytes]:
        status, message = error.status, error.message
        if error.tokens is not None:
            # The words that clients know an overflow by.
            message = "The input token count ({}) exceeds the maximum number of tokens allowed ({}).".format(
                *error.tokens
            )
        info = {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": error.code.upper(), "domain": "polar"}
        details: list[dict[str, Any]] = [info]
        if error.param:
            violation = {"field": _FIELDS.get(error.param, error.param), "description": message}
            details.append({"@type": "type.googleapis.com/google.rpc.BadRequest", "fieldViolations": [violation]})
        if error.retry_after:
            retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{error.retry_after}s"}
            details.append(retry)
        inner = {"code": status, "message": message, "status": _STATUS.get(status, "INTERNAL"), "details": details}
        return status, _encode({"error": inner})

    def encoder(self, answer: Answer) -> Encoder:
        if answer.request.extra.get("sse"):
            return google_answer.EventEncoder(answer)
        return google_answer.ArrayEncoder(answer)

    def whole(self, answer: Answer, events: list[Event]) -> bytes:
        return google_answer.whole(answer, events)

    def counted(self, tokens: int) -> bytes:
        return _encode({"totalTokens": tokens})

    def models(self, cards: list[ModelCard]) -> bytes:
        return _encode({"models": [_card(c) for c in cards]})

    def model(self, card: ModelCard) -> bytes:
        return _encode(_card(card))


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "name": f"models/{card.name}",
        "version": "1",
        "displayName": card.name,
        "inputTokenLimit": card.context_length,
        "outputTokenLimit": card.context_length,
        "supportedGenerationMethods": ["generateContent", "streamGenerateContent", "countTokens"],
    }


def _request(raw: dict[str, Any], call: Call) -> Request:
    counting = "verb" not in call.params
    verb = call.params.get("verb", "countTokens")
    if verb not in ("generateContent", "streamGenerateContent", "countTokens"):
        raise CallError("not_found", f"{verb:.60} is not served here", code="unknown_method")
    body = camel(raw, "body")
    if counting and "generateContentRequest" in body:
        body = camel(body["generateContentRequest"], "generateContentRequest")
    for name in ("cachedContent", "continuationToken"):
        if body.get(name):
            raise bad(f"'{name}' is not supported: send the content itself", name)
    config = camel(body.get("generationConfig", {}), "generationConfig")
    conversation = Conversation()
    if "systemInstruction" in body:
        conversation.system(body["systemInstruction"])
    begun = len(conversation.messages())
    for i, content in enumerate(many(body, "contents", "contents")):
        conversation.add(content, f"contents[{i}]")
    messages = conversation.messages()
    if len(messages) == begun:
        raise bad("'contents' must have at least one part", "contents")
    tools, hosted = google_tools.read(body)
    choice, said = google_tools.choice(body, tools)
    # Looked up by their full names, so that a refusal names them.
    full = {f"generationConfig.{k}": v for k, v in config.items()}
    limit = fields.count(full, "generationConfig.maxOutputTokens")
    stop = fields.stops(full, "generationConfig.stopSequences")
    wishes = fields.wishes(full, {f"generationConfig.{k}": v for k, v in _WISHES.items()})
    wishes |= {k: v for k, v in (("max_tokens", limit), ("stop", stop), ("tool_choice", said)) if v}
    _refuse(full)
    thinking = camel(config.get("thinkingConfig", {}), "generationConfig.thinkingConfig")
    thoughts = fields.flag(
        {f"generationConfig.thinkingConfig.{k}": v for k, v in thinking.items()},
        "generationConfig.thinkingConfig.includeThoughts",
    )
    alt = call.query.get("alt") or call.query.get("$alt")
    return Request(
        model=call.params.get("model", ""),
        messages=messages,
        tools=tools,
        tool_choice=choice,
        wishes=wishes,
        max_tokens=limit,
        stop=stop,
        stream=verb == "streamGenerateContent",
        identity=_encode([call.params.get("model", ""), {k: v for k, v in body.items() if k not in _VOLATILE}]),
        images=conversation.images,
        schema=_schema(config),
        labels=_labels(body, config, hosted),
        extra={"sse": alt == "sse", "thoughts": thoughts},
    )


def _refuse(full: dict[str, Any]) -> None:
    name = "generationConfig.candidateCount"
    if (n := fields.count(full, name)) is not None and n != 1:
        raise bad(f"'{name}' is {n}, only 1 is supported: sample again instead", name)
    name = "generationConfig.responseModalities"
    wanted = fields.items(full, name)
    if any(not isinstance(m, str) or m.upper() not in ("TEXT", "MODALITY_UNSPECIFIED") for m in wanted):
        raise bad(f"'{name}' may only have TEXT: this model answers in text", name, "unsupported_content")


def _schema(config: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema of the answer; {} for any JSON."""
    where = "generationConfig.responseMimeType"
    kind = fields.text_at(config, "responseMimeType", "generationConfig", "text/plain")
    given = next((n for n in ("responseJsonSchema", "responseSchema", "responseFormat") if n in config), None)
    if given == "responseFormat" or kind not in ("text/plain", "application/json"):
        name = "generationConfig.responseFormat" if given == "responseFormat" else where
        raise bad(
            f"'{name}' is not supported; for JSON say responseMimeType 'application/json', with a responseJsonSchema",
            name,
            "unsupported_response_format",
        )
    if kind == "text/plain":
        if given:
            raise bad(f"'generationConfig.{given}' needs '{where}' to be 'application/json'", where)
        return None
    if given == "responseJsonSchema":
        return fields.obj(config[given], f"generationConfig.{given}")
    return google_tools.json_schema(config[given], f"generationConfig.{given}") if given else {}


def _labels(body: dict[str, Any], config: dict[str, Any], hosted: list[str]) -> dict[str, str]:
    """What was left out of account, for the record."""
    ignored = sorted([*(set(body) - _TOP), *(f"generationConfig.{k}" for k in set(config) - _CONFIG)])
    left_out = {"ignored_fields": ignored, "dropped_tools": hosted}
    return {k: ",".join(v)[:500] for k, v in left_out.items() if v}
