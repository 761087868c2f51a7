"""Content blocks of the Messages API as the text that the model reads.

Blocks of one text are joined by a line break, except in assistant turns, whose blocks are pieces of one sample.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec import Struct

from proxy.dialects import anthropic_tools as tools
from proxy.dialects import fields
from proxy.failures import bad

# Made by Anthropic's servers, hence never by this proxy: they come from a conversation that began elsewhere.
_FOREIGN = {
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "advisor_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "tool_search_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "container_upload",
    "browser_state",
}
_OPAQUE = {
    "type",
    "cache_control",
    "encrypted_content",
    "encrypted_index",
    "encrypted_stdout",
    "signature",
    "citations",
}
_DEPTH = 8  # documents in documents


class Reader(Struct):
    """Reads blocks of one request; `images` counts what became a placeholder."""

    tools: tools.Tools
    images: int = 0

    def texts(self, value: Any, where: str, depth: int = 0) -> list[str]:
        """The texts of a string or a list of blocks; blocks without any are left out."""
        return [t for t, _ in self.pieces(value, where, depth) if t]

    def pieces(self, value: Any, where: str, depth: int = 0) -> list[tuple[str, str]]:
        """(text, path) of a string or of each block of a list."""
        if value is None:
            return []
        if isinstance(value, str):
            return [(value, where)]
        return [(self.block(b, w, depth), w) for b, w in blocks(value, where)]

    def block(self, b: dict[str, Any], where: str, depth: int = 0) -> str:
        """The text of any block but tool_use, tool_result and thinking. Raises CallError naming it."""
        kind = text(b, "type", where)
        if kind == "text":
            return text(b, "text", where)
        if depth > _DEPTH:
            raise bad(f"'{where}' is nested too deeply", where)
        if kind == "image":
            return self._source(b, where, "image", depth)
        if kind == "document":
            heads = [text(b, k, where, "") if b.get(k) is not None else "" for k in ("title", "context")]
            return _lines([*heads, self._source(b, where, "document", depth)])
        if kind == "search_result":
            head = f"[search result: {text(b, 'title', where, '')} ({text(b, 'source', where, '')})]"
            return _lines([head, *self.texts(b.get("content"), f"{where}.content", depth + 1)])
        if kind == "tool_reference":
            return self.tools.referred(text(b, "tool_name", where))
        if kind in ("tool_addition", "tool_removal"):
            return self._change(b, kind, where)
        if kind == "compaction":
            content = b.get("content")
            return _lines(["[summary of the conversation so far]", text(b, "content", where)]) if content else ""
        if kind == "fallback":
            return ""
        if kind in _FOREIGN:
            return f"[{kind}: {_json(_plain(b), where)}]"
        raise bad(f"{where}.type is {kind!r:.60}, which is not supported here", f"{where}.type", "unsupported_content")

    def _source(self, b: dict[str, Any], where: str, what: str, depth: int) -> str:
        at = f"{where}.source"
        source = fields.obj(b.get("source"), at)
        kind = text(source, "type", at)
        if what == "document" and kind == "text":
            return text(source, "data", at)
        if what == "document" and kind == "content":
            return _lines(self.texts(source.get("content"), f"{at}.content", depth + 1))
        names = {"base64": "data", "url": "url", "file": "file_id"}
        if kind not in names:
            raise bad(f"{at}.type is {kind!r:.40}, allowed: {', '.join(names)}", f"{at}.type")
        data = text(source, names[kind], at)
        usual = {"image": "image", "document": "application/pdf"}[what]
        media = source.get("media_type", usual)
        if not isinstance(media, str):
            raise bad(f"'{at}.media_type' must be a string", f"{at}.media_type")
        self.images += 1
        return fields.image_placeholder(media, data).replace("[image", f"[{what}", 1)

    def _change(self, b: dict[str, Any], kind: str, where: str) -> str:
        tool = fields.obj(b.get("tool"), f"{where}.tool")
        if tool.get("type") == "tool_definition":
            definition = fields.obj(tool.get("definition"), f"{where}.tool.definition")
            return self.tools.added(tools.function(definition, f"{where}.tool.definition"))
        name = next((tool[k] for k in ("tool_name", "name", "server_name") if isinstance(tool.get(k), str)), "")
        if not name:
            raise bad(f"'{where}.tool' names no tool", f"{where}.tool")
        return self.tools.referred(name) if kind == "tool_addition" else f"[the tool {name} is no longer available]"


def blocks(value: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """(block, path) of a string or a list of blocks."""
    if isinstance(value, str):
        return [({"type": "text", "text": value}, where)]
    if not isinstance(value, list):
        raise bad(f"'{where}' must be a string or a list of blocks", where)
    out: list[tuple[dict[str, Any], str]] = []
    for i, b in enumerate(value):
        # Some clients put plain strings among the blocks.
        at = f"{where}[{i}]"
        out.append(({"type": "text", "text": b} if isinstance(b, str) else fields.obj(b, at), at))
    return out


def text(b: dict[str, Any], key: str, where: str, default: str | None = None) -> str:
    value = b.get(key, default)
    if not isinstance(value, str):
        raise bad(f"'{where}.{key}' must be a string", f"{where}.{key}")
    return value


def arguments(value: Any, where: str) -> str:
    """A tool_use's `input` as JSON text. What Claude Code couldn't parse comes back as it was sampled."""
    if value is None:
        return "{}"
    given = fields.obj(value, where)
    unparsed = given.get("__unparsedToolInput")
    if isinstance(unparsed, dict) and len(given) == 1 and isinstance(unparsed.get("raw"), str):
        return unparsed["raw"]
    return _json(given, where)


def _json(value: Any, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError) as e:
        raise bad(f"'{where}' can't be written as JSON", where) from e


def _plain(value: Any, depth: int = 0) -> Any:
    """A foreign block without what no model can read."""
    if depth > 64:
        return "…"
    if isinstance(value, dict):
        return {k: _plain(v, depth + 1) for k, v in value.items() if k not in _OPAQUE or (depth and k == "type")}
    if isinstance(value, list):
        return [_plain(v, depth + 1) for v in value]
    return value


def _lines(texts: list[str]) -> str:
    return "\n".join(t for t in texts if t)
