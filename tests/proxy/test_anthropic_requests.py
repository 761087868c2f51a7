"""What a Messages request means, and that no request can mean anything but a neutral request or a refusal."""

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


# Messages ---------------------------------------------------------------------------------------------------------------


def test_strings_and_lists_of_one_text_are_the_same_call():
    cached = {"cache_control": {"type": "ephemeral"}}
    one = parse([user("go")], system="Be careful.", tools=[TOOL], stream=False)
    other = parse(
        [user([text("go", **cached)])],
        system=[
            text("x-anthropic-billing-header: cc_version=2.1.332.abc; cc_entrypoint=sdk-cli; cch=1a2b3;"),
            text("Be careful.", **cached),
        ],
        tools=[{**TOOL, **cached, "type": "custom"}],
        stream=True,
        metadata={"user_id": "random"},
        cache_control={"type": "ephemeral"},
        diagnostics={"previous_message_id": None},
    )
    assert one.messages == other.messages == [{"role": "system", "content": "Be careful."}, user("go")]
    assert one.identity == other.identity and one.tools == other.tools
    assert parse([user("go!")], system="Be careful.", tools=[TOOL]).identity != one.identity


@pytest.mark.parametrize(
    "change",
    [
        {"max_tokens": 10},
        {"stop_sequences": ["a"]},
        {"tools": [TOOL]},
        {"model": "n"},
        {"thinking": {"type": "disabled"}},
    ],
)
def test_what_the_answer_depends_on_makes_another_call(change):
    assert parse([user("go")], **change).identity != parse([user("go")]).identity


def test_system_messages_stay_in_their_place():
    request = parse(
        [
            user("a"),
            {"role": "system", "content": [text("b"), text("c")]},
            {"role": "assistant", "content": "d"},
            {"role": "system", "content": "e"},
            user("f"),
        ],
        system=[text("s1"), text("s2")],
    )
    assert [(m["role"], m["content"]) for m in request.messages] == [
        ("system", "s1\ns2"),
        ("user", "a"),
        ("system", "b\nc"),
        ("assistant", "d"),
        ("system", "e"),
        ("user", "f"),
    ]


def test_consecutive_messages_of_a_role_are_one_turn():
    request = parse(
        [
            user("a"),
            user([text("b")]),
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": seal("c_1")}]},
            {"role": "assistant", "content": [text("c")]},
            {"role": "assistant", "content": [use("u1", command="ls")]},
            user([result("u1")]),
            user("d"),
        ]
    )
    call = {"id": "u1", "type": "function", "function": {"name": "run", "arguments": '{"command": "ls"}'}}
    assert request.messages == [
        user("a\nb"),
        {"role": "assistant", "content": "c", "reasoning_content": "t", "tool_calls": [call], "refs": ["c_1"]},
        {"role": "tool", "tool_call_id": "u1", "content": "ok", "name": "run"},
        user("d"),
    ]


def test_results_come_before_the_rest_of_their_turn():
    request = parse(
        [
            user("go"),
            {"role": "assistant", "content": [use("u1"), use("u2", "read")]},
            user([result("u2", [text("x"), text("y")]), text("and"), result("u1", "boom", is_error=True), text("so?")]),
        ]
    )
    assert request.messages[2:] == [
        {"role": "tool", "tool_call_id": "u2", "content": "x\ny", "name": "read"},
        {"role": "tool", "tool_call_id": "u1", "content": "[tool error]\nboom", "name": "run"},
        user("and\nso?"),
    ]


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_results_may_be_empty(content):
    messages = parse([user([result("u1", content)]), user([result("u2", content, is_error=True)])]).messages
    assert [m["content"] for m in messages] == ["", "[tool error]"]


def test_images_and_documents_become_placeholders():
    picture = base64.b64encode(b"picture").decode()

    def image(**source: str) -> dict:
        return {"type": "image", "source": source}

    request = parse(
        [
            user(
                [
                    image(type="base64", media_type="image/png", data=picture),
                    image(type="url", url="http://a/b.png"),
                    image(type="file", file_id="f1"),
                    {
                        "type": "document",
                        "source": {"type": "base64", "media_type": "application/pdf", "data": picture},
                    },
                    {
                        "type": "document",
                        "title": "T",
                        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
                    },
                    {"type": "document", "source": {"type": "content", "content": [text("E")]}, "context": "C"},
                    {"type": "search_result", "title": "S", "source": "http://s", "content": [text("found")]},
                ]
            ),
            {"role": "assistant", "content": [use("u1")]},
            user([result("u1", [text("see"), image(type="base64", media_type="image/png", data=picture)])]),
        ]
    )
    lines = request.messages[0]["content"].split("\n")
    assert request.images == 5
    assert lines[0].startswith("[image image/png, ") and lines[3].startswith("[document application/pdf, ")
    assert len({*lines[:3]}) == 3 and "http://a/b.png" not in request.messages[0]["content"]
    assert lines[4:] == ["T", "D", "C", "E", "[search result: S (http://s)]", "found"]
    assert request.messages[2]["content"] == f"see\n{lines[0]}"


def test_blocks_made_by_another_provider_are_readable():
    foreign = [
        text("I look."),
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {
            "type": "web_search_tool_result",
            "tool_use_id": "s1",
            "content": [{"type": "web_search_result", "title": "T", "encrypted_content": "zzz"}],
        },
        {"type": "mcp_tool_use", "id": "m1", "name": "f", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [text("from afar")]},
        {"type": "compaction", "content": "Earlier."},
        {"type": "fallback", "from": {}, "to": {}},
    ]
    (_, answer, _) = parse([user("go"), {"role": "assistant", "content": foreign}, user("on")]).messages
    assert '"query": "q"' in answer["content"] and '"title": "T"' in answer["content"]
    assert "Earlier." in answer["content"] and "from afar" in answer["content"] and "zzz" not in answer["content"]


def test_arguments_that_could_not_be_parsed_are_as_sampled():
    raw = '{"command": "ls'
    block = {**use("u1"), "input": {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}}
    messages = parse([user("go"), {"role": "assistant", "content": [block]}, user([result("u1")])]).messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == raw


# Tools ------------------------------------------------------------------------------------------------------------------


def test_tools_that_the_provider_runs_are_left_out_and_recorded():
    hosted = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "mcp_toolset", "mcp_server_name": "x"},
    ]
    servers = [{"type": "url", "url": "http://x", "name": "x", "authorization_token": "secret"}]
    request = parse([user("go")], tools=[TOOL, *hosted], mcp_servers=servers)
    assert [t["function"]["name"] for t in request.tools] == ["run"]
    assert request.wishes["left_out_tools"] == [t["type"] for t in hosted]
    assert "secret" not in repr(request)
    # Claude Code searches so.
    forced = parse([user("go")], tools=hosted[:1], tool_choice={"type": "tool", "name": "web_search"})
    assert forced.tools == [] and not forced.calls_allowed


@pytest.mark.parametrize(
    "kind, name, properties",
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "insert_text", "view_range"}),
        ("text_editor_20250124", "str_replace_editor", {"command", "path", "new_str"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}),
    ],
)
def test_tools_that_the_client_runs_get_a_schema(kind, name, properties):
    (tool,) = parse([user("go")], tools=[{"type": kind, "name": name}]).tools
    assert tool["function"]["name"] == name and properties <= set(tool["function"]["parameters"]["properties"])
    assert tool["function"]["description"]


def test_examples_of_inputs_are_shown():
    (tool,) = parse([user("go")], tools=[{**TOOL, "input_examples": [{"command": "ls"}]}]).tools
    assert '{"command":"ls"}' in tool["function"]["description"]


def test_deferred_tools_come_up_where_they_are_referred_to():
    """The prompt before a reference is the same with and without it, however the list of tools grows."""
    search, late = (
        {**TOOL, "name": "search"},
        {**TOOL, "name": "late", "description": "It is late.", "defer_loading": True},
    )
    start = [user("go")]
    found = [
        {"role": "assistant", "content": [use("u1", "search")]},
        user([result("u1", [{"type": "tool_reference", "tool_name": "late"}])]),
    ]
    before = parse(start, tools=[search])
    known = parse(start, tools=[search, late])
    after = parse(start + found, tools=[search, late])
    assert before.tools == known.tools == after.tools and after.messages[:1] == before.messages
    assert [t["function"]["name"] for t in after.later_tools] == ["late"], "its calls are read by its schema"
    shown = after.messages[-1]["content"]
    assert "It is late." in shown and json.loads(shown.split("\n")[2])["function"]["name"] == "late"


def test_deferred_tools_are_offered_where_nothing_could_bring_them_up():
    late = {**TOOL, "defer_loading": True}
    for tools in ([late], [late, {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}]):
        assert [t["function"]["name"] for t in parse([user("go")], tools=tools).tools] == ["run"]


def test_tools_come_and_go_in_system_messages():
    definition = {"type": "tool_definition", "definition": {**TOOL, "name": "fresh"}}
    blocks = [
        {"type": "tool_addition", "tool": definition},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "run"}},
    ]
    request = parse([user("go"), {"role": "system", "content": blocks}], tools=[TOOL])
    content = request.messages[1]["content"]
    assert [t["function"]["name"] for t in request.later_tools] == ["fresh"]
    assert '"fresh"' in content and "run is no longer available" in content


def test_fields_from_the_future_are_recorded():
    assert parse([user("go")], telepathy=True).wishes["unknown_fields"] == ["telepathy"]


# Signatures -------------------------------------------------------------------------------------------------------------


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


# Anything at all --------------------------------------------------------------------------------------------------------

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
