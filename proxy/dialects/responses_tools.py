"""Tools of the Responses dialect: every kind that the client executes is offered to the model as a function.

What the model calls is turned back into the item of the tool's kind, provided that the item says all that the model said.
A call that doesn't fit its tool's form keeps its arguments verbatim, for the client to complain about: as a custom tool's
input under a marked call id, else as a `function_call`.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from proxy.dialects import fields
from proxy.dialects.responses_calls import BUILT_IN, ITEM_OF, RAW, TEXT, Kind, form_of
from proxy.dialects.responses_fields import items
from proxy.failures import bad
from proxy.neutral import ToolCall, ToolChoice

# Run by OpenAI's servers, or answered with pictures: nothing here can serve them, and most clients offer them unasked.
HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "computer",
    "programmatic_tool_calling",
)


class Tool(Struct, frozen=True):
    kind: Kind
    name: str
    namespace: str | None


class Toolbox:
    """The tools of one request, under names that no two of them share. `offered` goes into the prompt; `dropped` names what
    can't be served."""

    def __init__(self) -> None:
        self.offered: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self._by_name: dict[str, Tool] = {}
        self._names: dict[Tool, str] = {}

    def offer(self, raw: list[Any], where: str) -> None:
        self.offered += self._take(raw, where, searchable=False)

    def load(self, raw: list[Any], where: str) -> list[dict[str, Any]]:
        """Make further tools callable that the conversation tells of itself; returns what to tell."""
        return self._take(raw, where, searchable=True)

    def name(self, kind: Kind, name: str, namespace: str | None = None) -> str:
        """What the model knows a tool as, that the client calls by (namespace, name)."""
        known = self._names.get(Tool(kind, name, namespace))
        return known if known is not None else _joined(namespace, name)

    def item(self, call: ToolCall, id_of: Any) -> dict[str, Any]:
        """The finished output item of a call, without its status. `id_of(prefix)` makes its id."""
        tool = self._by_name.get(call.name) or Tool("function", call.name, None)
        own = {"arguments": call.arguments} if tool.kind == "function" else form_of(tool.kind, call.arguments)
        call_id = call.id
        if own is None and tool.kind == "custom":
            own, call_id = {"input": call.arguments}, call.id + RAW
        elif own is None:
            tool, own = Tool("function", call.name, None), {"arguments": call.arguments}
        kind, prefix = ITEM_OF[tool.kind]
        out: dict[str, Any] = {"type": kind, "id": id_of(prefix), "call_id": call_id}
        if tool.kind in ("function", "custom"):
            out["name"] = tool.name
            if tool.namespace is not None:
                out["namespace"] = tool.namespace
        return out | own

    def choice(self, value: Any) -> ToolChoice:
        """Named and allowed tools are recorded elsewhere; here only whether there may or should be a call."""
        if value is None or value == "auto":
            return "auto"
        if value == "none":
            return "none"
        if value == "required":
            return self._required("tool_choice")
        if not isinstance(value, dict):
            raise bad(f"'tool_choice' is {value!r:.40}, allowed: auto, none, required, or an object", "tool_choice")
        kind = fields.text_at(value, "type", "tool_choice", "function")
        if kind == "allowed_tools":
            items(value, "tools", "tool_choice")
            if (mode := value.get("mode", "auto")) not in ("auto", "required"):
                raise bad(f"'tool_choice.mode' is {mode!r:.40}, allowed: auto, required", "tool_choice.mode")
            return "auto" if mode == "auto" else self._required("tool_choice.mode")
        if kind in ("function", "custom"):
            name, namespace = fields.text_at(value, "name", "tool_choice"), value.get("namespace")
            if not any(t.name == name and (namespace is None or t.namespace == namespace) for t in self._names):
                raise bad(f"tool_choice.name '{name:.60}' is none of the tools", "tool_choice.name")
            return "required"
        if not any(t.kind == kind for t in self._names):
            raise bad(f"tool_choice.type '{kind:.40}' is none of the tools that can be served here", "tool_choice.type")
        return "required"

    def _required(self, where: str) -> ToolChoice:
        if not self._names:
            raise bad(f"'{where}' requires a tool call, but no tool can be served", where)
        return "required"

    def _take(self, raw: list[Any], where: str, searchable: bool) -> list[dict[str, Any]]:
        flat = self._flat(raw, where)
        # A tool that waits to be found is told of when it is; if the client doesn't search, it would never be.
        hides = not searchable and any(t.kind == "tool_search" for t, _, _ in flat)
        out = []
        # Functions go by their own names, whatever else is there.
        for tool, definition, place in sorted(
            flat, key=lambda f: f[0].kind != "function" or f[0].namespace is not None
        ):
            if tool in self._names and not searchable:
                self.dropped.append(f"{place}: a second '{tool.name}'"[:200])
                continue
            if tool not in self._names:
                name = self._unique(_joined(tool.namespace, tool.name))
                self._names[tool], self._by_name[name] = name, tool
            name = self._names[tool]
            if not (hides and definition.pop("defer_loading")):
                definition.pop("defer_loading", None)
                out.append((place, {"type": "function", "function": {"name": name, **definition}}))
        order = {place: i for i, (_, _, place) in enumerate(flat)}
        return [d for _, d in sorted(out, key=lambda o: order[o[0]])]

    def _unique(self, name: str) -> str:
        out, n = name, 1
        while out in self._by_name:
            n += 1
            out = f"{name}_{n}"
        return out

    def _flat(self, raw: list[Any], where: str) -> list[tuple[Tool, dict[str, Any], str]]:
        """(tool, definition without its name, place) of everything that can be served."""
        out: list[tuple[Tool, dict[str, Any], str]] = []
        for i, value in enumerate(raw):
            place = f"{where}[{i}]"
            t = fields.obj(value, place)
            kind = fields.text_at(t, "type", place)
            if kind != "namespace":
                self._one(out, t, kind, None, place)
                continue
            namespace, about = fields.text_at(t, "name", place), fields.text_at(t, "description", place, "")
            for j, value in enumerate(items(t, "tools", place)):
                here = f"{place}.tools[{j}]"
                t = fields.obj(value, here)
                before = len(out)
                self._one(out, t, fields.text_at(t, "type", here, "function"), namespace, here)
                if about and j == 0 and len(out) > before:
                    definition = out[-1][1]
                    definition["description"] = f"({namespace}: {about})\n{definition['description']}"
        return out

    def _one(self, out: list[Any], t: dict[str, Any], kind: str, namespace: str | None, place: str) -> None:
        if kind == "function":
            parameters = t.get("parameters")
            if parameters is not None:
                fields.obj(parameters, f"{place}.parameters")
            definition: dict[str, Any] = {
                "description": fields.text_at(t, "description", place, ""),
                # Some clients leave out the schema of a tool without parameters; templates expect one.
                "parameters": parameters or {"type": "object", "properties": {}},
            }
        elif kind == "custom":
            about = fields.text_at(t, "description", place, "") + _format(t.get("format"), place)
            definition = {"description": about, "parameters": _object({"input": TEXT}, ["input"])}
        elif namespace is None and kind in BUILT_IN and not _hosted(t, kind):
            about, properties, required = BUILT_IN[kind]
            definition = {"description": about, "parameters": _object(properties, required)}
            if kind == "tool_search":
                definition["description"] = fields.text_at(t, "description", place, about)
                if t.get("parameters") is not None:
                    definition["parameters"] = fields.obj(t["parameters"], f"{place}.parameters")
        elif namespace is None and (kind in BUILT_IN or kind.startswith(HOSTED)):
            self.dropped.append(kind[:40])
            return
        else:
            raise bad(f"{place}.type is '{kind:.40}', which is no tool known here", f"{place}.type")
        name = fields.text_at(t, "name", place) if kind in ("function", "custom") else kind
        if not 0 < len(name) <= 256:
            raise bad(f"'{place}.name' must have 1 to 256 characters", f"{place}.name")
        definition["defer_loading"] = t.get("defer_loading") is True
        out.append((Tool(kind, name, namespace), definition, place))  # type: ignore[arg-type]


def _hosted(t: dict[str, Any], kind: str) -> bool:
    if kind == "shell":
        environment = t.get("environment")
        return isinstance(environment, dict) and environment.get("type") != "local"
    return kind == "tool_search" and t.get("execution") != "client"


def _format(value: Any, place: str) -> str:
    if value is None:
        return ""
    form = fields.obj(value, f"{place}.format")
    # Chat clients nest what Responses has flat.
    nested = form.get("grammar")
    inner: dict[str, Any] = nested if isinstance(nested, dict) else form
    if form.get("type") != "grammar":
        return ""
    definition = fields.text_at(inner, "definition", f"{place}.format")
    return f"\n`input` is plain text that follows this {fields.text_at(inner, 'syntax', f'{place}.format')} grammar:\n{definition}"


def _joined(namespace: str | None, name: str) -> str:
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required}
