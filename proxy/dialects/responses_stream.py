"""The answer side of the Responses dialect: neutral events to output items, the events that tell of them, and their sum.

Items grow and are complete as they are sampled, but every `output_item.done` waits for the end of the answer: upon it Codex
runs a tool or takes a message into its history, and an answer that breaks off must have left nothing behind.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from proxy.dialects import sse
from proxy.dialects.base import Answer
from proxy.dialects.responses_ids import item_id, seal, summary_of
from proxy.dialects.responses_tools import Toolbox
from proxy.neutral import Event, Finish, Reasoning, Text, ToolCall, Usage

Told = dict[str, Any]
# What a first event says of the response; only the last one repeats all that was asked for.
_BARE: dict[str, Any] = {
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": None,
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
}


class _Form(Struct, frozen=True):
    """How the text of an item is told: the type of its part, the item's field, the names of the events about the text and
    about the part, and what these call the part's place."""

    kind: str
    field: str
    text: str
    part: str
    index: str


_MESSAGE = _Form("output_text", "content", "output_text", "content_part", "content_index")
_REASONING = _Form("reasoning_text", "content", "reasoning_text", "content_part", "content_index")
_SUMMARY = _Form("summary_text", "summary", "reasoning_summary_text", "reasoning_summary_part", "summary_index")


class Output:
    """Events in, told events out (without sequence numbers); `response` is the whole one once Finish has come."""

    def __init__(self, answer: Answer):
        extra = answer.request.extra
        self._id, self._tools = answer.id, extra["tools"]
        assert isinstance(self._tools, Toolbox)
        self._sealed, self._compact = bool(extra["sealed"]), bool(extra["compact"])
        self._summarised = bool(extra["summarised"])  # reasoning is told as its own summary
        self._head = {
            "id": item_id("resp", answer.id),
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
        }
        self._echo: dict[str, Any] = extra["echo"]
        self._items: list[dict[str, Any]] = []
        self._open: str = ""  # kind of the item that grows: reasoning, message or none
        self._pieces: list[str] = []
        self._calls = 0
        self._reasoning: list[str] = []
        self._text: list[str] = []
        self.response: dict[str, Any] | None = None

    def begin(self) -> list[Told]:
        return [self._told("created", response=self._begun()), self.alive()]

    def alive(self) -> Told:
        return self._told("in_progress", response=self._begun())

    def event(self, event: Event) -> list[Told]:
        if isinstance(event, Finish):
            return self._finish(event)
        if self._compact:
            if not isinstance(event, ToolCall):
                (self._text if isinstance(event, Text) else self._reasoning).append(event.text)
            return []
        if isinstance(event, ToolCall):
            return self._call(event)
        out = []
        kind = "reasoning" if isinstance(event, Reasoning) else "message"
        if self._open != kind:
            out += self._close("completed")
            out += self._grow(kind)
        self._pieces.append(event.text)
        logprobs: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        out.append(self._told(f"{self._form().text}.delta", **self._part_place(), delta=event.text, **logprobs))
        return out

    def summary(self) -> str:
        return summary_of("".join(self._text), "".join(self._reasoning))

    # Items -----------------------------------------------------------------------------------------------------------

    def _grow(self, kind: str) -> list[Told]:
        self._open, self._pieces = kind, []
        item: dict[str, Any] = {"type": kind, "id": self._next("rs" if kind == "reasoning" else "msg")}
        own: dict[str, Any] = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
        item.update(own, content=[], status="in_progress")
        self._items.append(item)
        return [
            self._told("output_item.added", output_index=len(self._items) - 1, item=item),
            self._told(f"{self._form().part}.added", **self._part_place(), part=self._part("")),
        ]

    def _close(self, status: str) -> list[Told]:
        if not self._open:
            return []
        whole = "".join(self._pieces)
        part = self._part(whole)
        place = self._part_place()
        form = self._form()
        item = self._items[-1] | {form.field: [part], "status": status}
        logprobs: dict[str, Any] = {} if self._open == "reasoning" else {"logprobs": []}
        if self._open == "reasoning" and self._sealed:
            item["encrypted_content"] = seal("reasoning", self._id, whole)
        self._items[-1] = item
        self._open = ""
        done = self._told(f"{form.text}.done", **place, text=whole, **logprobs)
        return [done, self._told(f"{form.part}.done", **place, part=part)]

    def _call(self, call: ToolCall) -> list[Told]:
        out = self._close("completed")
        item = self._tools.item(call, lambda prefix: item_id(prefix, self._id, self._calls))
        self._calls += 1
        index = len(self._items)
        self._items.append(item | {"status": "completed"})
        grows = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
        begun = item | {"status": "in_progress"} | ({grows: ""} if grows else {})
        out.append(self._told("output_item.added", output_index=index, item=begun))
        if grows:
            name = "function_call_arguments" if grows == "arguments" else "custom_tool_call_input"
            place = {"item_id": item["id"], "output_index": index}
            out.append(self._told(f"{name}.delta", **place, delta=item[grows]))
            out.append(self._told(f"{name}.done", **place, **{grows: item[grows]}))
        return out

    def _finish(self, finish: Finish) -> list[Told]:
        cut = finish.reason == "length"
        out: list[Told] = []
        if self._compact:
            item = {
                "type": "compaction",
                "id": self._next("cmp"),
                "encrypted_content": seal("compaction", self._id, self.summary()),
            }
            self._items.append(item)
            out.append(self._told("output_item.added", output_index=0, item=item))
        elif not cut and not any(i["type"] != "reasoning" for i in self._items):
            # An answer without a word is a turn, too: the client has something to say back.
            out += self._close("completed")
            out += self._grow("message")
        status = "incomplete" if cut else "completed"
        out += self._close(status)
        out += [self._told("output_item.done", output_index=i, item=item) for i, item in enumerate(self._items)]
        self.response = {
            **self._head,
            "status": status,
            **self._echo,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._items,
            "usage": usage(finish.usage),
        }
        return [*out, self._told(status, response=self.response)]

    # Small things ----------------------------------------------------------------------------------------------------

    def _begun(self) -> dict[str, Any]:
        return {**self._head, "status": "in_progress", **_BARE, "output": [], "usage": None}

    def _next(self, prefix: str) -> str:
        return item_id(prefix, self._id, len(self._items))

    def _part_place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, self._form().index: 0}

    def _form(self) -> _Form:
        return _MESSAGE if self._open == "message" else _SUMMARY if self._summarised else _REASONING

    def _part(self, text: str) -> dict[str, Any]:
        more: dict[str, Any] = {"annotations": [], "logprobs": []} if self._open == "message" else {}
        return {"type": self._form().kind, "text": text, **more}

    @staticmethod
    def _told(name: str, **rest: Any) -> Told:
        return {"type": f"response.{name}", **rest}


class StreamEncoder:
    headers = sse.HEADERS

    def __init__(self, answer: Answer):
        self._output = Output(answer)
        self._number = 0

    def start(self) -> bytes:
        return self._bytes(self._output.begin())

    def event(self, event: Event) -> bytes:
        return self._bytes(self._output.event(event))

    def heartbeat(self) -> bytes:
        # Codex's idle timer counts real events only.
        return self._bytes([self._output.alive()])

    def _bytes(self, told: list[Told]) -> bytes:
        out = []
        for t in told:
            out.append(sse.event(t["type"], {**t, "sequence_number": self._number}))
            self._number += 1
        return b"".join(out)


def folded(answer: Answer, events: list[Event]) -> Output:
    """The output of a whole answer."""
    output = Output(answer)
    for e in events:
        output.event(e)
    return output


def usage(u: Usage) -> dict[str, Any]:
    return {
        "input_tokens": u.prompt_tokens,
        "input_tokens_details": {"cached_tokens": u.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": u.sampled_tokens,
        "output_tokens_details": {"reasoning_tokens": u.reasoning_tokens},
        "total_tokens": u.prompt_tokens + u.sampled_tokens,
    }
