"""What the tests of the Responses dialect ask with: the official client, tools, and items as they go back."""

from __future__ import annotations

import json
from typing import Any

import openai

RUN = {
    "type": "function",
    "name": "run",
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    "strict": False,
}


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}


AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}


def call(name: str, **arguments: Any) -> str:
    inner = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{inner}\n</tool_call>"


RUN_LS = call("run", command="ls")


def client(world, capability: str, **options) -> Any:
    return openai.AsyncOpenAI(base_url=f"{world.server.url}/s/{capability}/v1", api_key="x", max_retries=0, **options)


def user(text: Any) -> dict:
    return {"role": "user", "content": text}


def result(item: Any, text: Any = "ok") -> dict:
    kind = {"custom_tool_call": "custom_tool_call_output"}.get(item.type, "function_call_output")
    return {"type": kind, "call_id": item.call_id, "output": text}


def links(world, grant) -> list[str]:
    return [c.link for c in sorted(world.stored(grant), key=lambda c: c.index)]


async def streamed(api, **request) -> tuple[list, Any]:
    """(events, final response) as the official client puts them together."""
    async with api.responses.stream(**request) as stream:
        events = [e async for e in stream]
        return events, await stream.get_final_response()


def without_parsed(value: Any) -> Any:
    """An output item without what the official client adds to it."""
    if isinstance(value, list):
        return [without_parsed(v) for v in value]
    if not isinstance(value, dict):
        return value
    return {k: without_parsed(v) for k, v in value.items() if k not in ("parsed", "parsed_arguments")}


async def streamed_raw(api, **request) -> tuple[list, Any]:
    events = [e async for e in await api.responses.create(**request, stream=True)]
    return events, events[-1].response


def dicts(response: Any) -> list[dict]:
    """Output items as they go back into the next input."""
    return [i.to_dict() for i in response.output]


async def whole(api, **request) -> tuple[list, Any]:
    return [], await api.responses.create(**request)


def output(item: Any) -> dict:
    found = {"type": "function", "name": "commit", "description": "Commit.", "defer_loading": True}
    return {
        "function_call": lambda: result(item, [{"type": "input_text", "text": "né"}]),
        "custom_tool_call": lambda: result(item),
        "local_shell_call": lambda: {"type": "local_shell_call_output", "id": item.call_id, "output": "a b"},
        "shell_call": lambda: {
            "type": "shell_call_output",
            "call_id": item.call_id,
            "output": [{"stdout": "a\n", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
        "apply_patch_call": lambda: {
            "type": "apply_patch_call_output",
            "call_id": item.call_id,
            "status": "completed",
        },
        "tool_search_call": lambda: {
            "type": "tool_search_output",
            "call_id": item.call_id,
            "execution": "client",
            "status": "completed",
            "tools": [{"type": "namespace", "name": "mcp__git__", "description": "Git.", "tools": [found]}],
        },
    }[item.type]()


def resolved(completion, world, grant) -> list[dict]:
    """All messages of a completion."""
    if not completion.message_shared:
        return completion.messages
    parent = next(c for c in world.stored(grant) if c.completion_id == completion.parent_id)
    return [*resolved(parent, world, grant), parent.response][: completion.message_shared] + completion.messages
