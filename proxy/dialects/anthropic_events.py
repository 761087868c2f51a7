"""Neutral events as the events of a Messages stream, and the message that they add up to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects import sse
from proxy.dialects.anthropic_signature import seal
from proxy.dialects.base import Answer
from proxy.neutral import Event, Finish, Reasoning, Text, ToolCall, Usage

Wire = dict[str, Any]

_PING = sse.event("ping", {"type": "ping"})


class MessageEvents:
    """One answer's wire events, in order. A block is open until another kind of content or the end comes."""

    def __init__(self, answer: Answer):
        self._answer = answer
        self._index = -1
        self._open = ""

    def start(self) -> Wire:
        a = self._answer
        message: Wire = {
            "id": f"msg_{a.id}",
            "type": "message",
            "role": "assistant",
            "model": a.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "stop_details": None,
            "usage": _usage(Usage(prompt_tokens=a.prompt_tokens, sampled_tokens=0)),
        }
        return {"type": "message_start", "message": message}

    def of(self, event: Event) -> list[Wire]:
        if isinstance(event, Text):
            opened = self._block("text", {"type": "text", "text": ""})
            return [*opened, self._delta({"type": "text_delta", "text": event.text})]
        if isinstance(event, Reasoning):
            opened = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*opened, self._delta({"type": "thinking_delta", "thinking": event.text})]
        if isinstance(event, ToolCall):
            closed = self._close()
            opened = self._block("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})
            delta = self._delta({"type": "input_json_delta", "partial_json": event.arguments})
            return [*closed, *opened, delta, *self._close()]
        return [*self._close(), *self._end(event)]

    def _block(self, kind: str, block: Wire) -> list[Wire]:
        if self._open == kind:
            return []
        closed = self._close()
        self._index += 1
        self._open = kind
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: Wire) -> Wire:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Wire]:
        if not self._open:
            return []
        out: list[Wire] = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            out.insert(0, self._delta({"type": "signature_delta", "signature": seal(self._answer.id)}))
        self._open = ""
        return out

    def _end(self, finish: Finish) -> list[Wire]:
        matched = finish.stop_sequence if finish.reason == "stop" else None
        delta = {"stop_reason": self._reason(finish), "stop_sequence": matched, "stop_details": None}
        return [{"type": "message_delta", "delta": delta, "usage": _usage(finish.usage)}, {"type": "message_stop"}]

    def _reason(self, finish: Finish) -> str:
        if finish.reason == "tool_calls":
            return "tool_use"
        if finish.reason == "length":
            used = finish.usage.prompt_tokens + finish.usage.sampled_tokens
            # Engines keep the last token of the context for themselves.
            full = 0 < self._answer.context_length <= used + 1
            asked = self._answer.request.max_tokens
            if full and (asked is None or finish.usage.sampled_tokens < asked):
                return "model_context_window_exceeded"
            return "max_tokens"
        return "stop_sequence" if finish.stop_sequence is not None else "end_turn"


class MessageEncoder:
    """Server-sent events of a Messages stream."""

    def __init__(self, answer: Answer):
        self._events = MessageEvents(answer)
        self.headers: Mapping[str, str] = {**sse.HEADERS, "request-id": answer.id}

    def start(self) -> bytes:
        return _sent([self._events.start()])

    def event(self, event: Event) -> bytes:
        return _sent(self._events.of(event))

    def heartbeat(self) -> bytes:
        return _PING


def _sent(events: list[Wire]) -> bytes:
    return b"".join(sse.event(e["type"], e) for e in events)


def whole(answer: Answer, events: list[Event]) -> Wire:
    """The message that a client would put together from the stream."""
    stream = MessageEvents(answer)
    message: Wire = stream.start()["message"]
    content: list[Wire] = message["content"]
    texts: list[str] = []
    for wire in (w for e in events for w in stream.of(e)):
        if wire["type"] == "content_block_start":
            content.append(dict(wire["content_block"]))
            texts = []
        elif wire["type"] == "content_block_delta":
            delta = wire["delta"]
            if delta["type"] == "signature_delta":
                content[-1]["signature"] = delta["signature"]
            else:
                texts.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
        elif wire["type"] == "content_block_stop":
            block = content[-1]
            if block["type"] == "tool_use":
                block["input"] = msgspec.Raw("".join(texts).encode())
            else:
                block[block["type"]] = "".join(texts)
        elif wire["type"] == "message_delta":
            message |= {**wire["delta"], "usage": wire["usage"]}
    return message


def _usage(u: Usage) -> Wire:
    # Here, unlike elsewhere, the input tokens don't include the cached ones.
    return {
        "input_tokens": max(u.prompt_tokens - u.cached_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": u.cached_tokens,
        "output_tokens": u.sampled_tokens,
        "output_tokens_details": {"thinking_tokens": u.reasoning_tokens},
    }
