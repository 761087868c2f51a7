"""`contents` and `systemInstruction` to neutral messages.

A model turn may come back in pieces (SDK chats keep one content per streamed chunk), function calls without their ids or
with other ones (Gemini CLI puts the function's name before them), and thoughts may be missing: all of it leads to the same
message as our own answer.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections import deque
from typing import Any

from msgspec import Struct, field

from proxy.dialects import fields, google_signature
from proxy.dialects.google_names import camel, many
from proxy.failures import bad
from proxy.neutral import Message

_ROLES = {"user": "user", "": "user", "function": "user", "model": "assistant", "system": "system"}
# What says something about a part and is no content of it.
_ASIDE = {
    "thought",
    "thoughtSignature",
    "videoMetadata",
    "partMetadata",
    "mediaResolution",
    "mediaProcessing",
    "audioTranscription",
    "speechMetadata",
    "documentMetadata",
    "spreadsheetMetadata",
    "audioMetadata",
}
_CONTENT = (
    "text",
    "functionCall",
    "functionResponse",
    "inlineData",
    "fileData",
    "executableCode",
    "codeExecutionResult",
)
_READABLE = {"application/json", "application/xml", "application/yaml", "application/x-yaml", "application/javascript"}
_STANDARD = str.maketrans("-_", "+/")


class _Call(Struct):
    ours: str  # its id
    answered: bool = False


class _Turn(Struct):
    """A message in the making."""

    message: Message
    text: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    refs: set[str] = field(default_factory=set)
    by_id: dict[str, _Call] = field(default_factory=dict)  # by our id, and by the client's
    by_name: dict[str, deque[_Call]] = field(default_factory=dict)
    calls: deque[_Call] = field(default_factory=deque)


class Conversation:
    """What was read so far. `images` counts what a text model can't see."""

    def __init__(self) -> None:
        self.images = 0
        self._messages: list[Message] = []
        self._turn: _Turn | None = None  # open as long as there may be more of it
        self._called = _Turn({})  # the latest that had calls
        self._known: dict[str, str] = {}  # the client's ids of all calls to ours

    def system(self, value: Any) -> None:
        """`value` is a Content, or just its text."""
        texts = []
        for where, part in _parts(value, "systemInstruction"):
            extra = sorted(set(part) - _ASIDE - {"text"})
            if extra:
                raise bad(f"'{where}' has '{extra[0]}': system instructions are text", where, "unsupported_content")
            texts.append(fields.text_at(part, "text", where, ""))
        if text := "\n\n".join(t for t in texts if t):
            self._messages.append({"role": "system", "content": text})

    def add(self, value: Any, where: str) -> None:
        """One Content."""
        role = "user"
        if isinstance(value, dict):
            given = value.get("role")
            known = _ROLES.get("" if given is None else given) if isinstance(given, (str, type(None))) else None
            if known is None:
                raise bad(f"{where}.role is {given!r:.40}, allowed: user, model, function, system", f"{where}.role")
            role = known
        parts = _parts(value, where)
        if role == "assistant":
            self._resume({r[0] for _, p in parts if (r := google_signature.read(p.get("thoughtSignature")))})
        else:
            self._close()
        for at, part in parts:
            names = [n for n in _CONTENT if n in part]
            if not names and (extra := sorted(set(part) - _ASIDE)):
                raise bad(f"'{at}' has unknown content '{extra[0]}'", at, "unsupported_content")
            for name in names:
                if name == "functionResponse":
                    self._close()
                    self._messages.append(self._response(camel(part[name], f"{at}.{name}"), f"{at}.{name}"))
                elif name == "functionCall":
                    if role != "assistant":
                        raise bad(f"'{at}' has a functionCall, but its role is not 'model'", at)
                    self._call(self._turn or self._begin(role), part, f"{at}.functionCall")
                else:
                    turn = self._turn or self._begin(role)
                    thought = role == "assistant" and name == "text" and part.get("thought") is True
                    (turn.thoughts if thought else turn.text).append(self._seen(name, part, at))

    def messages(self) -> list[Message]:
        """All that was read."""
        self._close()
        return self._messages

    def _resume(self, refs: set[str]) -> None:
        """Go on with the model's turn, unless `refs` say that this one is another."""
        turn = self._turn
        if turn is None or turn.message["role"] != "assistant" or (turn.refs and refs and not turn.refs & refs):
            turn = self._begin("assistant")
        turn.refs |= refs

    def _begin(self, role: str) -> _Turn:
        self._close()
        self._turn = _Turn({"role": role, "content": ""})
        self._messages.append(self._turn.message)
        if role == "assistant":
            self._called = self._turn
        return self._turn

    def _close(self) -> None:
        """Joined at the end: a turn may come in very many parts."""
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.message["content"] = "".join(turn.text)
            if thoughts := "".join(turn.thoughts):
                turn.message["reasoning_content"] = thoughts
            if turn.refs:
                turn.message["refs"] = sorted(turn.refs)

    def _call(self, turn: _Turn, part: dict[str, Any], where: str) -> None:
        m = camel(part["functionCall"], where)
        name = fields.text_at(m, "name", where)
        theirs = fields.text_at(m, "id", where, "")
        signed = google_signature.read(part.get("thoughtSignature"))
        ours = theirs.removeprefix(f"{name}__")
        if signed and signed[1] and signed[1] not in turn.by_id:
            ours = signed[1]
        elif not ours:
            ours = f"call_{len(self._messages)}_{len(turn.calls)}"
        args = fields.obj(m.get("args", {}), f"{where}.args")
        call = _Call(ours)
        for known in (ours, theirs):
            if known:
                turn.by_id.setdefault(known, call)
                self._known[known] = ours
        turn.by_name.setdefault(name, deque()).append(call)
        turn.calls.append(call)
        function = {"name": name, "arguments": json.dumps(args, ensure_ascii=False)}
        turn.message.setdefault("tool_calls", []).append({"id": ours, "type": "function", "function": function})

    def _response(self, m: dict[str, Any], where: str) -> Message:
        name = fields.text_at(m, "name", where, "")
        response = fields.obj(m.get("response", {}), f"{where}.response")
        # `output` alone is how an ordinary result is given; anything else is told whole.
        inner: Any = response["output"] if set(response) == {"output"} else response
        texts = [inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)] if response else []
        for i, raw in enumerate(many(m, "parts", f"{where}.parts")):
            at = f"{where}.parts[{i}]"
            part = camel(raw, at)
            texts += [self._seen(kind, part, at) for kind in ("inlineData", "fileData") if kind in part]
        call = self._answered(fields.text_at(m, "id", where, ""), name)
        return {"role": "tool", "content": "\n".join(t for t in texts if t), "tool_call_id": call, "name": name}

    def _answered(self, theirs: str, name: str) -> str:
        """Our id of the call that a response is for: by its id, else the first of that name, else the first."""
        turn = self._called
        if theirs:
            if (found := turn.by_id.get(theirs)) is not None:
                found.answered = True
                return found.ours
            return self._known.get(theirs, theirs.removeprefix(f"{name}__"))
        for waiting in (turn.by_name.get(name), turn.calls):
            while waiting and waiting[0].answered:
                waiting.popleft()
            if waiting:
                waiting[0].answered = True
                return waiting[0].ours
        return ""

    def _seen(self, name: str, part: dict[str, Any], at: str) -> str:
        """What a text model reads of a part."""
        if name == "text":
            return fields.text_at(part, "text", at)
        where = f"{at}.{name}"
        m = camel(part[name], where)
        if name == "executableCode":
            return (
                f"```{fields.text_at(m, 'language', where, '').lower()}\n{fields.text_at(m, 'code', where, '')}\n```\n"
            )
        if name == "codeExecutionResult":
            return f"```\n{fields.text_at(m, 'output', where, '')}\n```\n"
        kind = fields.text_at(m, "mimeType", where, "")
        data = fields.text_at(m, "data" if name == "inlineData" else "fileUri", where, "")
        if name == "inlineData" and (kind.startswith("text/") or kind in _READABLE):
            return _decoded(data, f"{where}.data")
        self.images += 1
        return fields.image_placeholder(kind, data) if kind.startswith("image/") or not kind else _unseen(kind, data)


def _parts(value: Any, where: str) -> list[tuple[str, dict[str, Any]]]:
    """The parts of a Content with their places; a string is a text part."""
    if isinstance(value, str):
        return [(where, {"text": value})]
    if isinstance(value, list):  # not Google's, but several clients send bare parts
        value = {"parts": value}
    m = camel(value, where)
    if "parts" not in m and "text" in m:
        m = {"parts": [m]}
    out = []
    for i, raw in enumerate(many(m, "parts", f"{where}.parts")):
        at = f"{where}.parts[{i}]"
        out.append((at, {"text": raw} if isinstance(raw, str) else camel(raw, at)))
    return out


def _unseen(kind: str, data: str) -> str:
    return fields.image_placeholder(kind, data).replace("[image ", "[file ", 1)


def _decoded(data: str, where: str) -> str:
    try:
        text = data.translate(_STANDARD).rstrip("=")
        return base64.b64decode(text + "=" * (-len(text) % 4)).decode("utf-8", "replace")
    except (binascii.Error, ValueError) as e:
        raise bad(f"'{where}' is not base64", where) from e
