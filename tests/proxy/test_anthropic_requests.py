"""What a Messages request means."""

from __future__ import annotations

import base64

import pytest

from proxy.dialects.anthropic_signature import seal
from tests.proxy.anthropic_bodies import TOOL, parse, result, text, use, user


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


def test_fields_from_the_future_are_recorded():
    assert parse([user("go")], telepathy=True).wishes["unknown_fields"] == ["telepathy"]
