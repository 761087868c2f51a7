"""What all dialects are translated to: one request form going in, one sequence of events coming out."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from polar.completion import Role

# A message is a dict with role (system, user, assistant, tool) and content (str); an assistant's may have
# reasoning_content (str) and tool_calls ([{"id", "type": "function", "function": {"name", "arguments": JSON text}}]);
# a tool's has tool_call_id. An assistant's may also have `refs`: ids of completions that the client echoed in signatures,
# item ids or the like; they say which completion a turn is, and are no part of its content.
Message = dict[str, Any]

ToolChoice = Literal["auto", "none", "required"]
StopReason = Literal["stop", "length", "tool_calls"]


class Request(Struct, kw_only=True):
    """A model call. `tools` are {"type": "function", "function": {...}}; `later_tools` are not offered before the
    conversation but may come up in its text, so their calls are read by their schemas; `wishes` is what the harness said about
    sampling, under neutral names (temperature, top_p, top_k, min_p, seed, max_tokens, ...); `identity` is what makes two
    requests the same call, whatever their transport; `images` counts the images that became placeholders in the text;
    `schema` is the JSON schema that the answer must follow ({} for any JSON object); `marked_retry`: the client says that
    it sends this again; `role` and `labels` are what it said about itself; `extra` is the dialect's own."""

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    later_tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    wishes: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    stream: bool = False
    identity: bytes = b""
    images: int = 0
    schema: dict[str, Any] | None = None
    marked_retry: bool = False
    role: Role | None = None
    labels: dict[str, str] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def calls_allowed(self) -> bool:
        """Whether a sampled tool call is a call to the harness, or only text."""
        return bool(self.tools or self.later_tools) and self.tool_choice != "none"


class Usage(Struct, frozen=True, kw_only=True):
    """`sampled_tokens` has the `reasoning_tokens` in it; they are 0 where the tokens don't tell."""

    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Reasoning(Struct, frozen=True):
    text: str


class Text(Struct, frozen=True):
    text: str


class ToolCall(Struct, frozen=True):
    """A complete call; `arguments` is JSON text of an object."""

    id: str
    name: str
    arguments: str


class Finish(Struct, frozen=True, kw_only=True):
    """The last event of a whole answer."""

    reason: StopReason
    usage: Usage
    stop_sequence: str | None = None


Event = Reasoning | Text | ToolCall | Finish


def fold(events: list[Event]) -> tuple[Message, Finish | None]:
    """The assistant message that a sequence of events adds up to."""
    reasoning, text, calls, finish = [], [], [], None
    for e in events:
        if isinstance(e, Text):
            text.append(e.text)
        elif isinstance(e, Reasoning):
            reasoning.append(e.text)
        elif isinstance(e, ToolCall):
            function = {"name": e.name, "arguments": e.arguments}
            calls.append({"id": e.id, "type": "function", "function": function})
        else:
            finish = e
    message: Message = {"role": "assistant", "content": "".join(text)}
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = calls
    return message, finish


def unfold(message: Message) -> list[Event]:
    """Events (without the last) that fold to `message`."""
    events: list[Event] = []
    if message.get("reasoning_content"):
        events.append(Reasoning(message["reasoning_content"]))
    if message.get("content"):
        events.append(Text(message["content"]))
    for c in message.get("tool_calls", ()):
        events.append(ToolCall(c["id"], c["function"]["name"], c["function"]["arguments"]))
    return events
