"""Tools, tool choices and tool calls of Chat Completions. A custom (freeform) tool is offered to the model as a function
with one text `input`, and its calls are turned back."""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct, field

from proxy.dialects import fields
from proxy.failures import bad
from proxy.neutral import ToolCall, ToolChoice


class Tools(Struct):
    offered: list[dict[str, Any]] = field(default_factory=list)
    custom: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        return {t["function"]["name"] for t in self.offered}


def read(raw: list[Any]) -> Tools:
    out = Tools()
    functions: set[str] = set()
    for i, value in enumerate(raw):
        where = f"tools[{i}]"
        t = fields.obj(value, where)
        kind = t.get("type", "function")
        if kind == "function":
            inner = _function(fields.obj(t.get("function"), f"{where}.function"), f"{where}.function")
            functions.add(inner["name"])
        elif kind == "custom":
            inner = _custom(fields.obj(t.get("custom"), f"{where}.custom"), f"{where}.custom")
            out.custom.add(inner["name"])
        else:
            raise bad(f"{where}.type is {kind!r:.40}, allowed: function, custom", f"{where}.type", "unsupported_tool")
        if inner["name"] in functions and inner["name"] in out.custom:
            raise bad(f"{where} is a second tool named '{inner['name']:.60}', of another type", where)
        out.offered.append({"type": "function", "function": inner})
    return out


def choice(value: Any, tools: Tools) -> ToolChoice:
    """Whether there may or should be a call. Which tool is recorded, not forced: that would sample from another
    distribution than the policy's."""
    if value in (None, "auto", "none"):
        return "none" if value == "none" else "auto"
    wanted = "required"
    if isinstance(value, dict):
        wanted = _named(value, tools)
    elif value != "required":
        raise bad(f"'tool_choice' is {value!r:.40}, allowed: auto, none, required, or an object", "tool_choice")
    if wanted == "required" and not tools.offered:
        raise bad("'tool_choice' requires a call, but there are no 'tools'", "tool_choice")
    return "required" if wanted == "required" else "auto"


def _named(value: dict[str, Any], tools: Tools) -> str:
    kind = value.get("type", "function")
    if kind == "allowed_tools":
        where = "tool_choice.allowed_tools"
        allowed = fields.obj(value.get(kind), where)
        fields.items({f"{where}.tools": allowed.get("tools")}, f"{where}.tools")
        mode = fields.text_at(allowed, "mode", where, "auto")
        if mode not in ("auto", "required"):
            raise bad(f"'{where}.mode' is {mode!r:.40}, allowed: auto, required", f"{where}.mode")
        return mode
    if kind not in ("function", "custom"):
        raise bad(f"tool_choice.type is {kind!r:.40}, allowed: function, custom, allowed_tools", "tool_choice.type")
    where = f"tool_choice.{kind}"
    name = fields.text_at(fields.obj(value.get(kind), where), "name", where)
    if name not in tools.names:
        raise bad(f"{where}.name '{name:.60}' is none of the tools", f"{where}.name")
    return "required"


def function(raw: Any, where: str) -> dict[str, Any]:
    """Name and arguments (JSON text, verbatim) of a function that was called."""
    m = fields.obj(raw, where)
    arguments = m.get("arguments")
    if not isinstance(arguments, str):
        arguments = "{}" if arguments is None else json.dumps(arguments, ensure_ascii=False)
    return {"name": fields.text_at(m, "name", where), "arguments": arguments}


def call(raw: Any, where: str) -> dict[str, Any]:
    c = fields.obj(raw, where)
    if c.get("type") == "custom":
        m = fields.obj(c.get("custom"), f"{where}.custom")
        arguments = json.dumps({"input": fields.text_at(m, "input", f"{where}.custom", "")}, ensure_ascii=False)
        inner = {"name": fields.text_at(m, "name", f"{where}.custom"), "arguments": arguments}
    else:
        inner = function(c.get("function"), f"{where}.function")
    return {"id": fields.text_at(c, "id", where, ""), "type": "function", "function": inner}


def called(event: ToolCall, custom: set[str]) -> dict[str, Any]:
    """A call as the client gets it. One that doesn't fit its custom tool stays a function's, for the client to complain."""
    if event.name in custom:
        arguments = json.loads(event.arguments)
        if set(arguments) == {"input"} and isinstance(arguments["input"], str) and _whole(arguments["input"]):
            inner = {"name": event.name, "input": arguments["input"]}
            return {"id": event.id, "type": "custom", "custom": inner}
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}


def _function(m: dict[str, Any], where: str) -> dict[str, Any]:
    parameters = m.get("parameters")
    if parameters is not None:
        fields.obj(parameters, f"{where}.parameters")
    return {
        "name": _name(m, where),
        "description": fields.text_at(m, "description", where, ""),
        # Some harnesses leave out the schema of a tool without parameters; templates expect one.
        "parameters": parameters or {"type": "object", "properties": {}},
    }


def _custom(m: dict[str, Any], where: str) -> dict[str, Any]:
    about = fields.text_at(m, "description", where, "")
    form = fields.obj(m.get("format") or {}, f"{where}.format")
    if form.get("type") == "grammar":
        at = f"{where}.format.grammar"
        grammar = fields.obj(form.get("grammar"), at)
        about += (
            f"\n`input` is plain text that follows this {fields.text_at(grammar, 'syntax', at, 'lark')} grammar:\n"
            + fields.text_at(grammar, "definition", at)
        )
    parameters = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return {"name": _name(m, where), "description": about, "parameters": parameters}


def _name(m: dict[str, Any], where: str) -> str:
    name = fields.text_at(m, "name", where)
    if not name:
        raise bad(f"'{where}.name' is empty", f"{where}.name")
    return name


def _whole(text: str) -> bool:
    """Half a surrogate pair can't be sent but as an escape inside JSON text."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
