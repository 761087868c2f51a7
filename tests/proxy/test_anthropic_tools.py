"""What the tools of a Messages request mean: offered, deferred, left out."""

from __future__ import annotations

import json

import pytest

from proxy.failures import CallError
from tests.proxy.anthropic_bodies import TOOL, parse, result, use, user


def test_arguments_that_could_not_be_parsed_are_as_sampled():
    raw = '{"command": "ls'
    block = {**use("u1"), "input": {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}}
    messages = parse([user("go"), {"role": "assistant", "content": [block]}, user([result("u1")])]).messages
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == raw


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
    again = parse([*start, *found, *found], tools=[search, late])
    assert again.messages[: len(after.messages)] == after.messages
    assert again.messages[-1]["content"] == "[the tool late is available, as described above]"
    assert "It is late." in shown and json.loads(shown.split("\n")[2])["function"]["name"] == "late"


def test_deferred_tools_are_offered_where_nothing_could_bring_them_up():
    late = {**TOOL, "defer_loading": True}
    for tools in ([late], [late, {"type": "tool_search_tool_bm25_20251119", "name": "tool_search_tool_bm25"}]):
        assert [t["function"]["name"] for t in parse([user("go")], tools=tools).tools] == ["run"]


def test_references_make_no_long_conversation_of_a_short_request():
    """A tool is defined once, however often it is referred to, added and removed."""
    late = {**TOOL, "name": "late", "description": "x" * 100_000, "defer_loading": True}
    named = {"type": "tool_reference", "name": "late"}
    blocks = [{"type": "tool_reference", "tool_name": "late"}]
    blocks += [{"type": kind, "tool": named} for kind in ("tool_removal", "tool_addition")]
    others = [{**TOOL, "name": f"t{n}", "defer_loading": True} for n in range(5_000)]
    found = [{"type": "tool_reference", "tool_name": f"t{n}"} for n in range(5_000)]
    request = parse([user("go"), {"role": "system", "content": [*blocks * 1000, *found]}], tools=[TOOL, late, *others])
    assert sum(len(m["content"]) for m in request.messages) < 2_000_000


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


def test_a_call_can_only_be_required_where_there_are_tools():
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    for tools in ([TOOL], [hosted]):  # Claude Code asks so for a search, and gets an answer without one
        assert parse([user("go")], tools=tools, tool_choice={"type": "any"}).tool_choice == "required"
    with pytest.raises(CallError) as e:
        parse([user("go")], tool_choice={"type": "any"})
    assert e.value.param == "tool_choice"
