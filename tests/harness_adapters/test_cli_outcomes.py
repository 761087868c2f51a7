"""What the CLIs' own events come to. The lines are as the real CLIs wrote them, shortened."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters.registry import load_adapter
from polar.codec import pack
from polar.launch import Outcome
from polar.task import AgentSpec

NAMES = ["claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "pi", "mini_swe_agent"]


def outcome(name: str, code: int | None, *events: dict | str) -> Outcome:
    text = "".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in events)
    return load_adapter(AgentSpec(harness=name)).outcome(code, text)


INIT = {"type": "system", "subtype": "init", "session_id": "s"}
SAID = {
    "type": "assistant",
    "message": {"id": "msg_1", "content": [{"type": "tool_use", "id": "call_1", "name": "Bash", "input": {}}]},
}
TOOL = {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "call_1", "is_error": True}]}}
RESULT = {"type": "result", "subtype": "success", "is_error": False, "num_turns": 2, "result": "done", "stop_reason": "end_turn",
          "permission_denials": [], "usage": {"input_tokens": 10, "output_tokens": 3, "cache_read_input_tokens": 1}}  # fmt: skip


@pytest.mark.parametrize("name", ["claude_code", "qwen_code"])
def test_stream_json(name):
    good = outcome(name, 0, INIT, SAID, TOOL, {"type": "assistant", "message": {"id": "msg_2", "content": []}}, RESULT)
    assert good.termination == "finished"
    assert (
        good.notes["turns"] == 2
        and "partial" not in good.notes
        and good.notes["tool_calls"] == 1
        and good.notes["tool_errors"] == 1
    )
    assert good.notes["usage"] == {"prompt_tokens": 10, "sampled_tokens": 3, "cached_tokens": 1}
    # A tool was denied, and it went on to what it calls a success: nothing of ours denies, so something kept it from its work.
    denials = {"permission_denials": [{"tool_name": "Write"}, {"tool_name": "Bash"}, {"tool_name": "Bash"}]}
    denied = outcome(name, 0, INIT, SAID, {**RESULT, **denials})
    assert (denied.termination, denied.message) == ("agent_error", "exit code 0 after denied tools: Bash, Write")
    assert denied.notes["denied_tools"] == 3
    failed = outcome(name, 1, INIT, {**RESULT, **denials, "is_error": True, "result": "API Error: 503 away"})
    assert failed.message == "exit code 1: API Error: 503 away"
    # Exit code 0 without a result is an agent that did not come to its end.
    assert outcome(name, 0, INIT, SAID).termination == "agent_error"
    failed = outcome(name, 1, INIT, {**RESULT, "is_error": True, "result": "API Error: 503 away"})
    assert failed.termination == "agent_error" and failed.message == "exit code 1: API Error: 503 away"
    long = outcome(name, 1, INIT, {**RESULT, "is_error": True, "result": "Prompt is too long"})
    assert long.termination == "context_overflow"
    turns = outcome(name, 1, INIT, {**RESULT, "subtype": "error_max_turns", "is_error": True, "result": ""})
    assert turns.termination == "turn_limit"


def test_turns_are_answers():
    """Claude Code's own number is that of its tool calls and one; Qwen Code's events don't say what belongs together."""
    parts = [{"type": "assistant", "message": {"id": i, "content": []}} for i in ("msg_1", "msg_1", "msg_1", "msg_2")]
    result = {**RESULT, "num_turns": 5}
    subagent = {"type": "assistant", "message": {"id": "msg_3", "content": []}, "parent_tool_use_id": "toolu_1"}
    assert outcome("claude_code", 0, INIT, *parts, subagent, result).notes["turns"] == 2
    assert outcome("claude_code", 1, INIT, *parts).notes["turns"] == 2
    assert outcome("qwen_code", 0, INIT, *parts, result).notes["turns"] == 5
    assert "turns" not in outcome("qwen_code", 1, INIT, *parts).notes


def test_codex():
    start = {"type": "thread.started", "thread_id": "t-1"}
    call = {"type": "item.completed", "item": {"type": "command_execution", "status": "failed", "exit_code": 3}}
    said = {"type": "item.completed", "item": {"type": "agent_message", "text": "done"}}
    done = {"type": "turn.completed", "usage": {"input_tokens": 9, "cached_input_tokens": 2, "output_tokens": 4}}
    good = outcome("codex", 0, start, call, said, done)
    assert good.termination == "finished" and good.notes == {
        "thread": "t-1", "messages": 1, "tool_calls": 1, "tool_errors": 1,
        "usage": {"prompt_tokens": 9, "sampled_tokens": 4, "cached_tokens": 2},
    }  # fmt: skip
    failed = outcome("codex", 1, start, {"type": "turn.failed", "error": {"message": "stream disconnected"}})
    assert failed.termination == "agent_error" and "stream disconnected" in failed.message
    assert outcome("codex", 0, start, said).termination == "agent_error"
    full = {"type": "turn.failed", "error": {"message": "Codex ran out of room in the model's context window."}}
    assert outcome("codex", 1, start, full).termination == "context_overflow"


def test_gemini_cli():
    init = {"type": "init", "session_id": "s"}
    said = {"type": "message", "role": "assistant", "content": "done", "delta": True}
    tool = {"type": "tool_result", "tool_id": "x", "status": "error"}
    result = {"type": "result", "status": "success", "stats": {"input_tokens": 5, "output_tokens": 2, "cached": 1}}
    good = outcome("gemini_cli", 0, init, tool, said, result)
    assert good.termination == "finished" and good.notes["usage"] == {
        "prompt_tokens": 5,
        "sampled_tokens": 2,
        "cached_tokens": 1,
    }
    # Of a command that failed it says "success": what it says of errors is no count of them.
    assert good.notes["tool_calls"] == 1 and not good.notes.keys() & {"turns", "tool_errors"}
    # Empty answers until it gave up: exit code 0, and no word.
    assert outcome("gemini_cli", 0, init, result).termination == "agent_error"
    assert "authenticate" in outcome("gemini_cli", 41, "Invalid auth method selected.").message
    assert outcome("gemini_cli", 53, init).termination == "turn_limit"


def test_what_a_tool_printed_is_not_the_cli_s_word():
    call = {
        "type": "item.completed",
        "item": {"type": "command_execution", "aggregated_output": "maximum context length"},
    }
    assert outcome("codex", 1, call, "Error: disk full").termination == "agent_error"
    assert outcome("codex", 1, call, "Error: context_length_exceeded").termination == "context_overflow"


def test_opencode():
    call = {"type": "tool_use", "part": {"type": "tool", "state": {"status": "error"}}}
    step = {"type": "step_finish", "part": {"reason": "tool-calls", "tokens": {"input": 5, "output": 2}}}
    last = {"type": "step_finish", "part": {"reason": "stop", "tokens": {"input": 6, "output": 1}}}
    error = {"type": "error", "error": {"name": "APIError", "data": {"message": "Bad gateway"}}}
    good = outcome("opencode", 0, call, step, last)
    assert good.termination == "finished" and good.notes["turns"] == 2 and good.notes["tool_errors"] == 1
    assert good.notes["usage"] == {"prompt_tokens": 11, "sampled_tokens": 3}
    assert outcome("opencode", 0, step, error, last).termination == "finished"  # it mended that

    def ran(code: object) -> dict:
        return {"type": "tool_use", "part": {"state": {"status": "completed", "metadata": {"exit": code}}}}

    counted = outcome("opencode", 0, ran(3), ran(0), ran(None), {"type": "tool_use", "part": {"state": {}}}, last)
    assert counted.notes["tool_errors"] == 1 and counted.notes["tool_calls"] == 4
    bad = outcome("opencode", 1, step, error)
    assert bad.termination == "agent_error" and bad.message == "exit code 1: Bad gateway"
    assert outcome("opencode", 0, step).termination == "agent_error"


def test_opencode_mends_a_full_window():
    """As it was seen: a 400, a compaction, its work to the end, and exit code 1."""

    def step(reason: str) -> dict:
        return {"type": "step_finish", "part": {"reason": reason}}

    said = "This model's maximum context length is 60000 tokens"
    full = {"type": "error", "error": {"name": "ContextOverflowError", "data": {"message": said}}}
    go_on = {"type": "text", "part": {"synthetic": True, "text": "The conversation was compacted"}}
    begun = [step("tool-calls"), full, {"type": "text", "part": {"text": "a summary"}}, step("stop")]
    good = outcome("opencode", 1, *begun, go_on, step("tool-calls"), {"type": "text", "part": {}}, step("stop"))
    assert (good.termination, good.message, good.notes["mended"]) == ("finished", "", said)
    assert "error" not in good.notes
    # The summary's stop is no end, nor is one without an error that accounts for the exit code; other codes have other causes.
    for events in ([*begun, go_on], [*begun, go_on, step("tool-calls")], [step("stop")]):
        assert outcome("opencode", 1, *events).termination == "agent_error"
    assert outcome("opencode", 2, *begun).termination == "agent_error"
    again = outcome("opencode", 1, *begun, go_on, step("tool-calls"), full)
    assert again.termination == "context_overflow" and "mended" not in again.notes


def test_pi():
    def turn(reason: str, **more) -> dict:
        return {
            "type": "turn_end",
            "message": {"role": "assistant", "stopReason": reason, "usage": {"input": 4, "output": 1}, **more},
        }

    session = {"type": "session", "id": "s"}
    tool = {"type": "tool_execution_end", "toolCallId": "call_1", "isError": True}
    good = outcome("pi", 0, session, turn("toolUse"), tool, turn("stop"))
    assert good.termination == "finished" and good.notes["turns"] == 2 and good.notes["tool_errors"] == 1
    assert good.notes["usage"] == {"prompt_tokens": 8, "sampled_tokens": 2}
    bad = outcome("pi", 1, session, turn("error", errorMessage="503 away"))
    assert bad.termination == "agent_error" and bad.message == "exit code 1: 503 away"
    # The prompt didn't fit: exit code 0 and no answer. The proxy knows why.
    assert outcome("pi", 0, session).termination == "agent_error"
    assert (
        outcome("pi", 0, session, turn("error", errorMessage="maximum context length")).termination
        == "context_overflow"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_agent(name):
    killed = outcome(name, None, INIT)
    assert (killed.termination, killed.message) == ("agent_error", "the agent was killed")


@pytest.mark.parametrize("name", NAMES)
@given(code=st.sampled_from([None, 0, 1, 137]), output=st.text(max_size=300))
def test_any_output_is_read(name, code, output):
    """Whatever an agent prints, it ends as one of a few things, and never as success of anything."""
    for text in (output, f'{{"type":"result","stats":{output!r}}}\n', '{"type":"turn_end","message":' + "[" * 3000):
        found = load_adapter(AgentSpec(harness=name)).outcome(code, text)
        assert found.termination in ("finished", "agent_error", "context_overflow", "turn_limit", "agent_timeout")
        assert found.termination != "finished" or code == 0
        json.dumps(found.notes)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["type", "subtype", "message", "content", "error", "usage", "item", "part", "state", "status",
                         "reason", "stats", "tokens", "result", "is_error", "num_turns", "stopReason", "data"]),
        inner | st.sampled_from(["result", "assistant", "turn_end", "turn.failed", "turn.completed", "item.completed",
                                 "step_finish", "tool_use", "error", "success"]), max_size=6),
    max_leaves=12,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@given(values=st.lists(JSON, max_size=6))
def test_events_of_any_shape_are_read(name, values):
    text = "".join(json.dumps(v) + "\n" for v in values)
    for code in (0, 1):
        pack(load_adapter(AgentSpec(harness=name)).outcome(code, text))
