"""Calls of the tools that a Responses client executes: the arguments that the model wrote, and the item that says the same."""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from proxy.dialects import fields
from proxy.dialects.responses_fields import dumps
from proxy.failures import CallError

Kind = Literal["function", "custom", "local_shell", "shell", "apply_patch", "tool_search"]

_STRINGS: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
TEXT: dict[str, Any] = {"type": "string"}
_NUMBER: dict[str, Any] = {"type": "integer"}
BUILT_IN: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "local_shell": (
        "Run a command (a list: program and arguments) on the user's machine.",
        {"command": _STRINGS, "working_directory": TEXT, "timeout_ms": _NUMBER},
        ["command"],
    ),
    "shell": (
        "Run shell commands on the user's machine; they run at the same time.",
        {"commands": _STRINGS, "timeout_ms": _NUMBER, "max_output_length": _NUMBER},
        ["commands"],
    ),
    "apply_patch": (
        "Create, update or delete one file. `diff` is a V4A diff; deleting a file takes none.",
        {"type": {"enum": ["create_file", "update_file", "delete_file"]}, "path": TEXT, "diff": TEXT},
        ["type", "path"],
    ),
    "tool_search": (
        "Find further tools by a query. What is found can be called from then on.",
        {"query": TEXT, "limit": _NUMBER},
        ["query"],
    ),
}
ITEMS: dict[str, tuple[Kind, str]] = {  # item type -> kind, prefix of its id
    "function_call": ("function", "fc"),
    "custom_tool_call": ("custom", "ctc"),
    "local_shell_call": ("local_shell", "lsh"),
    "shell_call": ("shell", "sh"),
    "apply_patch_call": ("apply_patch", "apc"),
    "tool_search_call": ("tool_search", "tsc"),
}
ITEM_OF = {kind: (item, prefix) for item, (kind, prefix) in ITEMS.items()}
RAW = "_raw"  # ends the id of a custom tool's call whose input is the arguments as they were sampled


def arguments_of(kind: Kind, item: dict[str, Any], where: str) -> str:
    """The arguments, JSON text, that a call item stands for. CallError names a field of the wrong type."""
    if kind == "function":
        value = item.get("arguments", "{}")
        return value if isinstance(value, str) else dumps(value, f"{where}.arguments")
    if kind == "custom":
        return dumps({"input": fields.text_at(item, "input", where)}, where)
    if kind == "tool_search":
        return dumps(item.get("arguments", {}), f"{where}.arguments")
    if kind == "apply_patch":
        return dumps(fields.obj(item.get("operation"), f"{where}.operation"), where)
    action = fields.obj(item.get("action"), f"{where}.action")
    keep = {k: v for k, v in action.items() if k != "type" and v is not None and (k != "env" or v)}
    return dumps(keep, f"{where}.action")


def form_of(kind: Kind, arguments: str) -> dict[str, Any] | None:
    """An item's own fields for a call's arguments; None if the form has no place for all of them."""
    try:
        given = json.loads(arguments)
        own = _form(kind, given)
        if own is None or json.loads(arguments_of(kind, own, "")) != given:
            return None
        # What was sampled may hold half a surrogate pair, which no item can.
        msgspec.json.encode(own)
    except (ValueError, RecursionError, CallError):
        return None
    return own


def _form(kind: Kind, a: Any) -> dict[str, Any] | None:
    if not isinstance(a, dict):
        return None
    if kind == "custom":
        return {"input": a["input"]} if isinstance(a.get("input"), str) else None
    if kind == "tool_search":
        return {"execution": "client", "arguments": a}
    _, properties, required = BUILT_IN[kind]
    if not set(required) <= set(a) <= set(properties) or not all(_fits(v, properties[k]) for k, v in a.items()):
        return None
    if kind == "apply_patch":
        return {"operation": a} if ("diff" in a) == (a["type"] != "delete_file") else None
    if kind == "shell":
        return {"action": {"timeout_ms": None, "max_output_length": None, **a}}
    return {"action": {"type": "exec", "env": {}, "timeout_ms": None, "working_directory": None, **a}}


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value has one of the few shapes that the built-in tools know."""
    if "enum" in schema:
        return value in schema["enum"]
    if schema["type"] == "array":
        return isinstance(value, list) and all(isinstance(v, str) for v in value)
    return isinstance(value, str) if schema["type"] == "string" else type(value) is int
