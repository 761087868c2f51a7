"""Neutral events as GenerateContentResponse: whole, as server-sent events, and as the elements of one JSON array."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects import google_signature, sse
from proxy.dialects.base import Answer
from proxy.neutral import Event, Finish, Reasoning, Text, ToolCall, Usage, fold

_encode = msgspec.json.Encoder().encode


class Parts:
    """Events to parts. Thoughts are left out unless the request wants them. The first text and every call are signed: the
    signature stays when a client joins the text of chunks."""

    def __init__(self, answer: Answer):
        self._id = answer.id
        self._thoughts = bool(answer.request.extra.get("thoughts"))
        self._signed = False

    def of(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Reasoning):
            return {"text": event.text, "thought": True} if self._thoughts else None
        if isinstance(event, Text):
            part = {"text": event.text}
            if not self._signed:
                part["thoughtSignature"] = google_signature.issue(self._id)
                self._signed = True
            return part
        if isinstance(event, ToolCall):
            # The arguments as they were sampled: numbers keep their form.
            call = {"id": event.id, "name": event.name, "args": msgspec.Raw(event.arguments.encode())}
            return {"functionCall": call, "thoughtSignature": google_signature.issue(self._id, event.id)}
        return None


def response(answer: Answer, parts: list[dict[str, Any]], finish: Finish | None) -> bytes:
    candidate: dict[str, Any] = {"content": {"parts": parts, "role": "model"}, "index": 0}
    out: dict[str, Any] = {"candidates": [candidate]}
    if finish is not None:
        candidate["finishReason"] = "MAX_TOKENS" if finish.reason == "length" else "STOP"
        out["usageMetadata"] = _usage(finish.usage)
    return _encode(out | {"modelVersion": answer.model, "responseId": answer.id})


def whole(answer: Answer, events: list[Event]) -> bytes:
    message, finish = fold(events)
    assert finish is not None
    make = Parts(answer)
    calls = [e for e in events if isinstance(e, ToolCall)]
    folded: list[Event] = [Reasoning(message.get("reasoning_content", "")), Text(message["content"])]
    parts = [make.of(e) for e in [*(e for e in folded if e.text), *calls]]  # type: ignore[union-attr]
    return response(answer, [p for p in parts if p is not None] or [{"text": ""}], finish)


class _Encoder:
    """Calls go out with the last element: Gemini CLI runs a call of an answer that then breaks off, and takes what came
    for the whole turn."""

    headers: Mapping[str, str] = {}

    def __init__(self, answer: Answer):
        self._answer = answer
        self._make = Parts(answer)
        self._calls: list[dict[str, Any]] = []

    def event(self, event: Event) -> bytes:
        if isinstance(event, Finish):
            # SDKs throw away a turn that has a chunk without parts.
            return self._element(response(self._answer, self._calls or [{"text": ""}], event)) + self._end()
        part = self._make.of(event)
        if part is not None and isinstance(event, ToolCall):
            self._calls.append(part)
            part = None
        return self._element(response(self._answer, [part], None)) if part is not None else self.heartbeat()

    def heartbeat(self) -> bytes:
        """A blank line: Gemini CLI loses the event behind a comment."""
        return b"\n"

    def start(self) -> bytes:
        return b"\n"

    def _element(self, data: bytes) -> bytes:
        raise NotImplementedError

    def _end(self) -> bytes:
        return b""


class EventEncoder(_Encoder):
    """`alt=sse`."""

    headers = sse.HEADERS

    def _element(self, data: bytes) -> bytes:
        return b"data: " + data + b"\n\n"

    def broken(self, error: bytes) -> bytes:
        # The official SDKs raise it, and would take a mere end for that of the answer. Gemini CLI passes over it.
        return self._element(error)


class ArrayEncoder(_Encoder):
    """One JSON array, an element at a time; broken off, it is no JSON."""

    headers: Mapping[str, str] = {"Content-Type": "application/json; charset=utf-8", "Cache-Control": "no-cache"}

    def __init__(self, answer: Answer):
        super().__init__(answer)
        self._begun = False

    def start(self) -> bytes:
        return b"["

    def _element(self, data: bytes) -> bytes:
        comma = b",\n" if self._begun else b""
        self._begun = True
        return comma + data

    def _end(self) -> bytes:
        return b"]\n"


def _usage(u: Usage) -> dict[str, int]:
    return {
        "promptTokenCount": u.prompt_tokens,
        "cachedContentTokenCount": u.cached_tokens,
        "candidatesTokenCount": u.sampled_tokens - u.reasoning_tokens,
        "thoughtsTokenCount": u.reasoning_tokens,
        "totalTokenCount": u.prompt_tokens + u.sampled_tokens,
    }
