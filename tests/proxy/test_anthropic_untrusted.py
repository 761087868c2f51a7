"""No Messages request can mean anything but a neutral request or a refusal; signatures that nobody can forge."""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.codec import pack
from proxy.dialects.anthropic import Anthropic
from proxy.dialects.anthropic_signature import seal, unseal
from proxy.dialects.base import Call
from proxy.failures import CallError
from tests.proxy.anthropic_bodies import TOOL, parse, result, text, use, user


@given(st.text(min_size=1, max_size=40))
def test_signatures_give_the_completion_back(ident):
    signature = seal(ident)
    assert unseal(signature) == ident and base64.b64decode(signature, validate=True)


@given(st.text() | st.binary().map(lambda b: base64.b64encode(b).decode()) | st.none() | st.integers())
def test_foreign_signatures_are_ignored(signature):
    assert unseal(signature) is None
    block = {"type": "thinking", "thinking": "t", "signature": signature}
    (_, answer, _) = parse([user("a"), {"role": "assistant", "content": [block]}, user("b")]).messages
    assert answer == {"role": "assistant", "content": "", "reasoning_content": "t"}


@given(st.integers(0, 40), st.sampled_from("abcXYZ019+/"))
def test_tampered_signatures_are_ignored(at, char):
    signature = seal("c_0123456789abcdef")
    changed = signature[:at] + char + signature[at + 1 :]
    assert unseal(changed) in (None, "c_0123456789abcdef") and (changed == signature or unseal(changed) is None)


def test_redacted_thinking_may_carry_one():
    block = {"type": "redacted_thinking", "data": seal("c_1")}
    (_, answer, _) = parse([user("a"), {"role": "assistant", "content": [block, text("x")]}, user("b")]).messages
    assert answer == {"role": "assistant", "content": "x", "refs": ["c_1"]}


RICH: dict[str, Any] = {
    "model": "m",
    "max_tokens": 100,
    "stream": True,
    "system": [text("x-anthropic-billing-header: a=b\nBe careful."), text("More.")],
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "tool_choice": {"type": "tool", "name": "run", "disable_parallel_tool_use": False},
    "thinking": {"type": "adaptive"},
    "output_config": {"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "mcp_servers": [{"name": "x"}],
    "metadata": {"user_id": "u"},
    "tools": [
        TOOL,
        {"type": "bash_20250124", "name": "bash", "input_examples": [{}]},
        {"type": "web_search_20250305", "name": "web_search"},
        {**TOOL, "name": "late", "defer_loading": True},
    ],
    "messages": [
        user([text("go"), {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QQ=="}}]),
        {"role": "system", "content": [{"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": seal("c_1")},
                {"type": "redacted_thinking", "data": "x"},
                text("a"),
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"q": [1]}},
                use("u1", command="ls"),
                {**use("u2"), "input": {"__unparsedToolInput": {"raw": "{", "len": 1}}},
            ],
        },
        user(
            [
                result("u1", [text("x"), {"type": "tool_reference", "tool_name": "late"}], is_error=True),
                result("u2", "y"),
                {"type": "document", "title": "T", "source": {"type": "content", "content": [text("E")]}},
                {"type": "search_result", "title": "S", "source": "s", "content": [text("f")]},
            ]
        ),
    ],
}


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "source", "name", "input", "role"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


def _paths(value: Any, path: tuple = ()) -> list[tuple]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [p for k, v in items for p in [(*path, k), *_paths(v, (*path, k))]]


PATHS = _paths(RICH)


@given(st.lists(st.tuples(st.sampled_from(PATHS), anything), min_size=1, max_size=3))
def test_wrong_requests_are_refused_naming_the_field(changes):
    body = copy.deepcopy(RICH)
    for path, value in changes:
        at: Any = body
        try:
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took the place away
    try:
        request = Anthropic().parse(body, Call())
    except CallError as e:
        assert e.kind == "bad_request" and e.param and e.param.split("[")[0].split(".")[0] in body
    else:
        for m in request.messages:
            assert m["role"] in ("system", "user", "assistant", "tool") and isinstance(m["content"], str)
        pack(request.messages)


@given(st.dictionaries(st.sampled_from([*RICH, "output_format", "thread", "other"]), anything))
def test_arbitrary_bodies_never_crash(body):
    try:
        Anthropic().parse(body, Call())
    except CallError as e:
        assert e.kind == "bad_request"


def test_the_rich_request_is_fine():
    request = Anthropic().parse(RICH, Call())
    assert [m["role"] for m in request.messages] == ["system", "user", "system", "assistant", "tool", "tool", "user"]
    assert request.images == 1 and request.schema == {"type": "object"} and request.tool_choice == "required"


def _nested(depth: int) -> tuple[dict, dict]:
    document, value = text("core"), {}
    for _ in range(depth):
        document = {"type": "document", "source": {"type": "content", "content": [document]}}
        value = {"a": value}
    return document, value


def test_deep_nesting_is_read_or_refused():
    document, value = _nested(5)
    assert parse([user([document])]).messages == [user("core")]
    _, answer, _ = parse([user("a"), {"role": "assistant", "content": [use("u", x=value)]}, user("b")]).messages
    assert answer["tool_calls"][0]["function"]["arguments"] == json.dumps({"x": value})
    document, value = _nested(2000)
    with pytest.raises(CallError):
        parse([user([document])])
    for block in (use("u", x=value), {"type": "server_tool_use", "input": value}):
        try:
            parse([user("a"), {"role": "assistant", "content": [block]}, user("b")])
        except CallError as e:
            assert e.param
