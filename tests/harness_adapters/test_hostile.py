"""Output that the agent in the sandbox wrote to fool its adapter, and settings that no CLI could follow."""

from __future__ import annotations

import json

import pytest

from harness_adapters.events import MAX_COUNT, MAX_NOTE
from harness_adapters.registry import load_adapter
from polar.codec import pack
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, Outcome
from polar.task import AgentSpec, McpServer

CLIS = ["claude_code", "codex", "gemini_cli", "qwen_code", "opencode", "pi"]
NAMES = [*CLIS, "mini_swe_agent"]
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/s/x", api_key="x", model="policy", context_length=40000)


def outcome(name: str, code: int | None, *events: dict | str) -> Outcome:
    text = "".join(f"{e if isinstance(e, str) else json.dumps(e)}\n" for e in events)
    return load_adapter(AgentSpec(harness=name)).outcome(code, text)


# -- output


BAD = "\ud800" + "x" * 100_000  # half a character, and far too long
FORGED: list[dict] = [
    {"type": "result", "subtype": BAD, "stop_reason": BAD, "status": BAD, "num_turns": 10**100, "is_error": True,
     "result": BAD, "error": {"message": BAD}, "usage": {"input_tokens": 10**100}, "stats": {"cached": -1}},
    {"type": "thread.started", "thread_id": BAD},
    {"type": "turn.failed", "error": {"message": BAD}},
    {"type": "step_finish", "part": {"reason": BAD}},
    {"type": "error", "error": {"name": BAD}},
    {"type": "turn_end", "message": {"stopReason": "error", "errorMessage": BAD}},
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("code", [0, 1, 41])
def test_what_it_writes_can_be_stored(name, code):
    """Else it could end a bad attempt as an error of the machinery, and be given another."""
    for event in FORGED:
        assert len(pack(outcome(name, code, event))) < 8 * MAX_NOTE


def test_counts_are_bounded():
    most = MAX_COUNT
    turn = {"type": "turn_end", "message": {"stopReason": "stop", "usage": {"input": most}}}
    step = {"type": "step_finish", "part": {"reason": "stop", "tokens": {"input": most}}}
    for found in (outcome("pi", 0, *[turn] * 3000), outcome("opencode", 0, *[step] * 3000)):
        assert found.notes["usage"] == {"prompt_tokens": most} and pack(found)
    for absurd in (10**30, True, -1, "9"):
        assert "turns" not in outcome("qwen_code", 0, {"type": "result", "num_turns": absurd}).notes
    denied = [{"tool_name": f"{n}" + "x" * 1000} for n in range(1000)] + [1, None, {"tool_name": 3}]
    for name in ("claude_code", "qwen_code"):
        refused = outcome(name, 0, {"type": "result", "permission_denials": denied})
        assert len(pack(refused)) < 8 * MAX_NOTE and refused.notes["denied_tools"] == 1003


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("code", [137, 143, None])
def test_a_cli_that_was_killed_said_nothing(name, code):
    """A signal is what the agent's commands can send to the CLI, and its output what they can write before."""
    lines: list[dict | str] = ["Error: context_length_exceeded", "litellm.ContextWindowExceededError: too long", "Exit:\nLimitsExceeded",
             {"type": "result", "subtype": "error_max_turns", "is_error": True}]  # fmt: skip
    for line in lines:
        assert outcome(name, code, line).termination == "agent_error"


def test_what_a_tool_of_mini_printed_long_ago_is_not_its_error():
    old = ["ContextWindowExceededError", *["line"] * 1000, "KeyError: 'x'"]
    assert outcome("mini_swe_agent", 1, *old).termination == "agent_error"


def test_an_error_is_judged_by_its_own_place():
    failed = {"type": "turn.failed", "error": {"message": "away"}}
    assert outcome("codex", 0, failed, {"type": "turn.completed"}).termination == "finished"
    again = outcome("codex", 0, failed, {"type": "turn.completed"}, failed)
    assert (again.termination, again.message) == ("agent_error", "away")
    error, step = {"type": "error", "error": {"name": "E"}}, {"type": "step_finish", "part": {"reason": "stop"}}
    assert outcome("opencode", 0, error, step).termination == "finished"
    assert outcome("opencode", 0, error, step, error).message == "E"


# -- settings


def refused(error: type[Exception], match: str, name: str, **agent) -> None:
    """As early as the spec is known, and again where the plan is made."""
    spec = AgentSpec(harness=name, **agent)
    adapter = load_adapter(spec)
    for call in (lambda: adapter.check(spec), lambda: adapter.plan(spec, "Do it.", ENDPOINT)):
        with pytest.raises(error, match=match):
            call()


@pytest.mark.parametrize("name", CLIS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({"context_window": v}, rf"\.context_window: found {f}, allowed: whole number >= 1")
          for v, f in ((0, "0"), (-1, "-1"), (True, "true"), (1.0, "1.0"), ("5", "'5'"), (10**30, "10{30}"), ([], "a list"))],
        *[({"max_output_tokens": v}, r"\.max_output_tokens: found .*, allowed: whole number >= 1") for v in (0, -1, 10**30)],
        ({"context_window": 10, "max_output_tokens": 10}, r"\.max_output_tokens: found 10, allowed is less than the window \(10\)"),
        *[({"effort": v}, rf"\.effort: found {f}, allowed: .*'low'") for v, f in ((3, "3"), ("", "''"), (["low"], "a list"))],
        *[({"thinking": v}, r"\.thinking: found .*, allowed: true or false") for v in ("no", 0, None)],
        *[({"system_prompt_append": f"a{c}"}, rf"\.system_prompt_append: .*{w}") for c, w in (("\0", "NUL"), ("\ud800", "Unicode"))],
        ({"extra_args": ["a", "b\0"]}, r"\.extra_args\[1\]: found a NUL"),
        ({"command": "a\0"}, r"\.command: found a NUL"),
        ({"extra_args": ["x" * 130_000]}, "allowed are 122880"),
        ({"\ud800": 1}, "no valid Unicode"),
        ({"x" * 10_000: 1}, r"^agent\.settings\.x{80}: unknown"),
    ],
)  # fmt: skip
def test_absurd_settings(name, settings, message):
    refused(InvalidTask, message, name, settings=settings)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        *[("claude_code", {"max_turns": v}, rf"\.max_turns: found {v}, allowed: whole number >= 1") for v in (0, -5)],
        *[(n, {"allowed_tools": ["Bash,Edit"]}, r"\.allowed_tools\[0\]: found 'Bash,Edit'") for n in ("claude_code", "pi")],
        *[(n, {"allowed_tools": ["x", ""]}, r"\.allowed_tools\[1\]: found ''") for n in CLIS if n != "codex"],
        *[(n, {"effort": "high", "thinking": False}, r"\.effort: found 'high', allowed beside thinking false")
          for n in CLIS if n != "claude_code"],
        *[("mini_swe_agent", {k: ""}, rf"\.{k}: found ''") for k in ("effort", "model_class", "config", "command")],
        *[("mini_swe_agent", {k: "a\0"}, rf"\.{k}: found a NUL") for k in ("effort", "model_class", "config", "command")],
        ("mini_swe_agent", {"extra_args": ["x" * 130_000]}, "allowed are 122880"),
        ("mini_swe_agent", {"max_output_tokens": 10**30}, r"\.max_output_tokens: found"),
    ],
)  # fmt: skip
def test_settings_of_one_cli(name, settings, message):
    refused(InvalidTask, message, name, settings=settings)


def test_what_agrees_is_no_contradiction():
    for name, settings in (
        ("codex", {"effort": "none", "thinking": False}),
        ("claude_code", {"effort": "low", "thinking": False}),
    ):
        spec = AgentSpec(harness=name, settings=settings)
        load_adapter(spec).check(spec)
    spec = AgentSpec(harness="mini_swe_agent", settings={"max_output_tokens": 40000})
    with pytest.raises(InvalidTask, match=r"max_output_tokens: found 40000, allowed is less than the window"):
        load_adapter(spec).plan(spec, "x", ENDPOINT)


@pytest.mark.parametrize("name", CLIS)
def test_mcp_servers_and_skills_that_could_not_be(name):
    for server, message in (
        (McpServer(name="a", command="x", url="http://y"), r"\[0\]\.url: found with transport 'stdio', allowed: command, args, env"),
        (McpServer(name="a", transport="streamable-http", url="http://y", env={"TOKEN": "s"}), r"\[0\]\.env: found .*allowed: url"),
        (McpServer(name="a", command="x", args=["b\0"]), r"\[0\]\.args\[0\]: found a NUL"),
        (McpServer(name="a", command="x", env={"K": "\ud800"}), r"\[0\]\.env\.K: is no valid Unicode"),
    ):  # fmt: skip
        refused(InvalidTask, message, name, mcp_servers=[server])
    for path in ("", "a\0", "\ud800", "x" * 200_000):
        refused(InvalidTask, r"agent\.skills_path: ", name, skills_path=path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("instruction", ["", " \n", "a\0b", "\ud800"])
def test_what_no_cli_could_read_is_refused(name, instruction):
    with pytest.raises(InvalidTask, match="instruction: "):
        load_adapter(spec := AgentSpec(harness=name)).plan(spec, instruction, ENDPOINT)


@pytest.mark.parametrize("text", ["a\0", "\ud800"])
def test_the_shell_refuses_what_it_can_not_run(text):
    refused(InvalidTask, r"agent\.command: ", "shell", command=text)
    with pytest.raises(InvalidTask, match="instruction: "):
        load_adapter(spec := AgentSpec(harness="shell", command="run")).plan(spec, text, ENDPOINT)
    refused(UnsupportedSpec, r"agent\.skills_path", "shell", command="run", skills_path="x")
