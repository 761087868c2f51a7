"""Pieces of Messages bodies, and what a body means."""

from __future__ import annotations

from typing import Any

from proxy.dialects.anthropic import Anthropic
from proxy.dialects.base import Call
from proxy.neutral import Request

TOOL = {"name": "run", "description": "Run.", "input_schema": {"type": "object", "properties": {}}}


def parse(messages: list, **params: Any) -> Request:
    return Anthropic().parse({"model": "m", "max_tokens": 9, "messages": messages, **params}, Call())


def user(content: Any) -> dict:
    return {"role": "user", "content": content}


def text(value: str, **more: Any) -> dict:
    return {"type": "text", "text": value, **more}


def use(ident: str, name: str = "run", **arguments: Any) -> dict:
    return {"type": "tool_use", "id": ident, "name": name, "input": arguments}


def result(ident: str, content: Any = "ok", **more: Any) -> dict:
    return {"type": "tool_result", "tool_use_id": ident, "content": content, **more}
