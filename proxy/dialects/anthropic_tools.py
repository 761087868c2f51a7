"""The `tools` and `tool_choice` of a Messages request.

Tools that the client runs are offered to the model, those with a schema of Anthropic's own under that schema. Tools that
Anthropic's servers would run are left out and recorded. A tool with `defer_loading` is not offered until the client refers
to it (`tool_reference`, `tool_addition`): then its definition stands in the conversation at that place, so that the prompt
before it stays as it was.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct, field

from proxy.dialects import fields
from proxy.failures import bad
from proxy.neutral import ToolChoice

_encode = msgspec.json.Encoder().encode

_DATED = re.compile(r"_\d{8}$")
# Run by the provider: the client couldn't answer a call of theirs.
_HOSTED = {
    "web_search",
    "web_fetch",
    "code_execution",
    "tool_search_tool_bm25",
    "tool_search_tool_regex",
    "advisor",
    "mcp_toolset",
}
_SIGHTED = {"computer", "computer_toolset", "browser_toolset"}
_EMPTY = {"type": "object", "properties": {}}


class Tools(Struct):
    """`offered` stand before the conversation; `deferred` may come up in it; `hosted` are the types left out. `told` are the
    deferred ones that did come up, by name."""

    offered: list[dict[str, Any]] = field(default_factory=list)
    deferred: list[dict[str, Any]] = field(default_factory=list)
    hosted: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    _deferred: dict[str, dict[str, Any]] = field(default_factory=dict)

    def defer(self, tool: dict[str, Any]) -> None:
        self.deferred.append(tool)
        self._deferred[tool["function"]["name"]] = tool

    def added(self, tool: dict[str, Any]) -> str:
        """What the conversation says where a tool is defined in it."""
        self.defer(tool)
        self.told.add(tool["function"]["name"])
        return shown(tool)

    def referred(self, name: str) -> str:
        """What the conversation says where a tool is named: its definition, the first time. Each time, many references to a
        long one would be more than the memory holds."""
        tool = self._deferred.get(name)
        if tool is None:
            return f"[tool {name}]"
        if name in self.told:
            return f"[the tool {name} is available, as described above]"
        self.told.add(name)
        return shown(tool)


def parse(raw: list[Any]) -> Tools:
    out, searched = Tools(), False
    for i, item in enumerate(raw):
        where = f"tools[{i}]"
        t = fields.obj(item, where)
        kind = _kind(t, where)
        if kind in _HOSTED:
            out.hosted.append(str(t["type"]))
            out.names.add(str(t.get("name", "")))
            searched = searched or kind.startswith("tool_search")
            continue
        tool = function(t, where)
        name = tool["function"]["name"]
        if name in out.names:
            raise bad(f"{where}.name is '{name[:80]}' a second time: tool names must be unique", f"{where}.name")
        out.names.add(name)
        later = t.get("defer_loading")
        if later not in (None, True, False):
            raise bad(f"'{where}.defer_loading' must be true or false", f"{where}.defer_loading")
        if later:
            out.defer(tool)
        else:
            out.offered.append(tool)
    if searched or not out.offered:
        # The search for them is the provider's and isn't there, or there is nothing that could bring them up.
        out.offered, out.deferred, out._deferred = out.offered + out.deferred, [], {}
    return out


def function(t: dict[str, Any], where: str) -> dict[str, Any]:
    """One tool that the client runs, in neutral form."""
    kind = _kind(t, where)
    name = t.get("name")
    if not isinstance(name, str) or not name:
        raise bad(f"'{where}.name' must be a non-empty string", f"{where}.name")
    if kind == "custom":
        description = t.get("description")
        if not isinstance(description, (str, type(None))):
            raise bad(f"'{where}.description' must be a string", f"{where}.description")
        schema = t.get("input_schema")
        schema = fields.obj(schema, f"{where}.input_schema") if schema is not None else None
        text = description or ""
    else:
        text, schema = _client_tool(kind, str(t["type"]))
    examples = t.get("input_examples")
    if examples is not None:
        if not isinstance(examples, list):
            raise bad(f"'{where}.input_examples' must be a list", f"{where}.input_examples")
        text = "\n".join([text, "Examples of its input:", *[_encode(e).decode() for e in examples]]).strip()
    return {"type": "function", "function": {"name": name, "description": text, "parameters": schema or _EMPTY}}


def choice(raw: Any, tools: Tools) -> ToolChoice:
    """`any` and `tool` are recorded and not forced: forcing would sample from another distribution."""
    if raw is None:
        return "auto"
    value = fields.obj(raw, "tool_choice")
    kind = value.get("type")
    fields.flag_at(value, "disable_parallel_tool_use", "tool_choice")
    if kind in ("auto", "none"):
        return kind  # type: ignore[return-value]
    if kind == "any":
        if not tools.names:
            raise bad("'tool_choice' requires a call, but there are no 'tools'", "tool_choice")
        return "required"
    if kind == "tool":
        name = value.get("name")
        if not isinstance(name, str) or name not in tools.names:
            raise bad(f"tool_choice.name is {name!r:.80}, which is not among 'tools'", "tool_choice.name")
        return "required"
    raise bad(f"tool_choice.type is {kind!r:.40}, allowed: auto, any, tool, none", "tool_choice.type")


def shown(tool: dict[str, Any]) -> str:
    """A deferred tool's definition as the conversation shows it."""
    return "This tool is available from here on:\n<tools>\n" + _encode(tool).decode() + "\n</tools>"


def _kind(t: dict[str, Any], where: str) -> str:
    """The type without its date. Raises CallError for what no client runs and nobody knows."""
    kind = t.get("type")
    if kind is None:
        return "custom"
    base = _DATED.sub("", kind) if isinstance(kind, str) else ""
    if base in _SIGHTED:
        raise bad(
            f"{where}.type is '{kind}': this model reads text only and can't see a screen",
            f"{where}.type",
            "unsupported_tool",
        )
    if base == "custom" or base in _HOSTED or base in ("bash", "text_editor", "memory"):
        return base
    raise bad(
        f"{where}.type is {kind!r:.60}; allowed: custom, bash_*, text_editor_*, memory_*, and the hosted {sorted(_HOSTED)}",
        f"{where}.type",
        "unsupported_tool",
    )


def _string(text: str) -> dict[str, Any]:
    return {"type": "string", "description": text}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


def _client_tool(kind: str, version: str) -> tuple[str, dict[str, Any]]:
    """(description, schema) of a tool whose schema Anthropic's models know by heart."""
    if kind == "bash":
        return "Run a command in a bash shell that stays open between calls.", _object(
            {
                "command": _string("The command to run. Needed unless the shell is restarted."),
                "restart": {"type": "boolean", "description": "Start the shell anew instead of running a command."},
            }
        )
    path = _string("Path of the file or directory.")
    lines = {
        "type": "array",
        "items": {"type": "integer"},
        "description": "First and last line to view, counted from 1; -1 as the last means the end of the file.",
    }
    common = {
        "path": path,
        "file_text": _string("The whole text of the file, for `create`."),
        "old_str": _string("The text to replace, for `str_replace`; it must occur exactly once."),
        "new_str": _string("The text to put in its place, for `str_replace`."),
        "insert_line": {"type": "integer", "description": "Line after which to insert; 0 is the start of the file."},
        "insert_text": _string("The text to insert, for `insert`."),
        "view_range": lines,
    }
    commands = ["view", "create", "str_replace", "insert"]
    if kind == "memory":
        moves = {"old_path": _string("For `rename`."), "new_path": _string("For `rename`.")}
        commands += ["delete", "rename"]
        text = "Read and write files under /memories, which are kept between conversations."
        return text, _object({"command": {"type": "string", "enum": commands}, **common, **moves}, "command")
    if version in ("text_editor_20241022", "text_editor_20250124"):
        commands.append("undo_edit")
        del common["insert_text"]
        common["new_str"] = _string("The text to put in its place, for `str_replace`, or to insert, for `insert`.")
    text = "View, create and edit text files."
    return text, _object({"command": {"type": "string", "enum": commands}, **common}, "command", "path")
