"""Function declarations, hosted tools, the tool configuration, and Google's OpenAPI-like schemas as JSON schemas."""

from __future__ import annotations

from typing import Any

from proxy.dialects import fields
from proxy.dialects.google_names import camel, many
from proxy.failures import bad
from proxy.neutral import ToolChoice

_CHOICES: dict[str, ToolChoice] = {
    "MODE_UNSPECIFIED": "auto",
    "AUTO": "auto",
    "VALIDATED": "auto",
    "ANY": "required",
    "NONE": "none",
}
_RENAMED = {"defs": "$defs", "ref": "$ref"}
_WHOLE = {
    "minItems",
    "maxItems",
    "minLength",
    "maxLength",
    "minProperties",
    "maxProperties",
}  # int64: JSON strings, too


def read(body: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The functions, and the names of the hosted tools beside them. A request for nothing but hosted tools is refused:
    whoever sends it wants what they do, not what a model makes up."""
    functions: list[dict[str, Any]] = []
    hosted: set[str] = set()
    for i, raw in enumerate(many(body, "tools", "tools")):
        tool = camel(raw, f"tools[{i}]")
        where = f"tools[{i}].functionDeclarations"
        functions += [_function(f, f"{where}[{j}]") for j, f in enumerate(many(tool, "functionDeclarations", where))]
        hosted |= set(tool) - {"functionDeclarations"}
    seen: set[str] = set()
    for name in (f["function"]["name"] for f in functions):
        if name in seen:
            raise bad(f"'tools' declare the function '{name:.60}' twice", "tools")
        seen.add(name)
    if hosted and not functions:
        asked = ", ".join(sorted(hosted))[:200]
        raise bad(f"'tools' asks for {asked}: hosted tools are not served here", "tools", "unsupported_tool")
    return functions, sorted(hosted)


def choice(body: dict[str, Any], functions: list[dict[str, Any]]) -> tuple[ToolChoice, dict[str, Any] | None]:
    """What is obeyed of the function calling mode, and the wish as it was said."""
    where = "toolConfig.functionCallingConfig"
    outer = camel(body.get("toolConfig", {}), "toolConfig")
    config = camel(outer.get("functionCallingConfig", {}), where)
    mode = fields.text_at(config, "mode", where, "AUTO").upper()
    if mode not in _CHOICES:
        raise bad(f"{where}.mode is {mode!r:.40}, allowed: AUTO, ANY, NONE, VALIDATED", f"{where}.mode")
    if mode == "ANY" and not functions:
        raise bad(f"'{where}.mode' is ANY, but 'tools' declare no function", f"{where}.mode")
    known = {f["function"]["name"] for f in functions}
    for name in many(config, "allowedFunctionNames", f"{where}.allowedFunctionNames"):
        if not isinstance(name, str) or name not in known:
            place = f"{where}.allowedFunctionNames"
            raise bad(f"'{place}' has {name!r:.60}, which is none of the functions", place)
    return _CHOICES[mode], config or None


def _function(raw: Any, where: str) -> dict[str, Any]:
    m = camel(raw, where)
    name = fields.text_at(m, "name", where)
    if not name:
        raise bad(f"'{where}.name' is empty", f"{where}.name")
    if "parametersJsonSchema" in m:
        parameters = fields.obj(m["parametersJsonSchema"], f"{where}.parametersJsonSchema")
    else:
        parameters = json_schema(m["parameters"], f"{where}.parameters") if "parameters" in m else {}
    inner = {
        "name": name,
        "description": fields.text_at(m, "description", where, ""),
        "parameters": parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": inner}


def json_schema(value: Any, where: str) -> dict[str, Any]:
    """An OpenAPI-like schema (upper-case types, `nullable`, `propertyOrdering`) as a JSON schema."""
    given = camel(value, where)
    out: dict[str, Any] = {}
    for key, v in given.items():
        if key == "type":
            kind = _type(v, f"{where}.type")
            if kind:
                out["type"] = kind
        elif key in ("properties", "defs", "$defs"):
            named = fields.obj(v, f"{where}.{key}")
            out[_RENAMED.get(key, key)] = {k: json_schema(s, f"{where}.{key}.{k:.40}") for k, s in named.items()}
        elif key == "items" or (key == "additionalProperties" and not isinstance(v, bool)):
            out[key] = json_schema(v, f"{where}.{key}")
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            options = fields.items({f"{where}.{key}": v}, f"{where}.{key}")
            out[key] = [json_schema(s, f"{where}.{key}[{i}]") for i, s in enumerate(options)]
        elif key == "example":
            out["examples"] = [v]
        elif key in _WHOLE and isinstance(v, str):
            if not (v.isascii() and v.isdigit() and len(v) < 19):
                raise bad(f"'{where}.{key}' must be a whole number, not {v!r:.40}", f"{where}.{key}")
            out[key] = int(v)
        elif key not in ("nullable", "propertyOrdering"):
            out[_RENAMED.get(key, key)] = v
    _order(out, given.get("propertyOrdering"))
    if given.get("nullable") is True:
        _or_null(out)
    return out


def _type(value: Any, where: str) -> str | list[str] | None:
    kinds = value if isinstance(value, list) else [value]
    if not kinds or not all(isinstance(k, str) for k in kinds):
        raise bad(f"'{where}' must be the name of a type", where)
    lower = [k.lower() for k in kinds if k.upper() != "TYPE_UNSPECIFIED"]
    return lower if isinstance(value, list) else lower[0] if lower else None


def _order(schema: dict[str, Any], names: Any) -> None:
    properties = schema.get("properties")
    if properties and isinstance(names, list):
        first = {n: properties[n] for n in names if isinstance(n, str) and n in properties}
        schema["properties"] = first | properties


def _or_null(schema: dict[str, Any]) -> None:
    kind = schema.get("type")
    if isinstance(kind, str):
        schema["type"] = [kind, "null"]
    elif isinstance(schema.get("anyOf"), list):
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
