"""`qwen_code`: Qwen Code (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from harness_adapters.cli import (
    MODEL,
    PATIENCE,
    CliAdapter,
    CliSettings,
    Limits,
    Text,
    json_file,
    limits,
    stdio,
)
from harness_adapters.common import ended_by_itself
from harness_adapters.events import MAX_NOTE, count, ended, events, numbers, of_type, text_of, whole
from polar.launch import Endpoint, LaunchPlan, Outcome
from polar.task import AgentSpec

HOME = "~/.polar/qwen"  # QWEN_HOME: what is ~/.qwen otherwise
_AUTH = {
    "openai_chat": "openai",
    "openai_responses": "openai-responses",
    "anthropic": "anthropic",
    "google": "gemini",
}
_KEY = {"openai_chat": "OPENAI_API_KEY", "openai_responses": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY",
        "google": "GEMINI_API_KEY"}  # fmt: skip
_USAGE = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "sampled_tokens",
    "cache_read_input_tokens": "cached_tokens",
}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`bare`: the CLI's minimal mode, for small models. `allowed_tools` restricts its core tools; its own helpers stay."""

    dialect: Literal["openai_chat", "openai_responses", "anthropic", "google"] = "openai_chat"
    effort: Literal["low", "medium", "high", "max"] | None = None
    allowed_tools: list[Text] | None = None
    bare: bool = False


class QwenCode(CliAdapter):
    name = "qwen_code"
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    settings = Settings
    skills = f"{HOME}/skills"

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        room = limits(s, endpoint)
        words = ["qwen", "--yolo", "--auth-type", _AUTH[s.dialect], "--model", MODEL]
        words += ["--output-format", "stream-json", "--chat-recording"]
        words += ["--bare"] if s.bare else []
        # A word with a newline in it is fine; only its size is bounded, by the system.
        words += ["--append-system-prompt", s.system_prompt_append] if s.system_prompt_append else []
        defaults = {
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "1",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(room.output),
            "NO_COLOR": "1",
        }
        return self.launch(
            words,
            s,
            agent,
            instruction,
            setup=['export QWEN_HOME="$HOME"/.polar/qwen'],
            defaults=defaults,
            fixed={_KEY[s.dialect]: endpoint.api_key},
            files=[json_file(f"{HOME}/settings.json", _settings(s, room, agent, endpoint))],
            artifacts=[f"{HOME}/projects"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        return stream_json_outcome(exit_code, output, _USAGE, _turns)


def _turns(found: list[dict[str, Any]]) -> int | None:
    """What its `result` counted: the parts of an answer are events without an id in common."""
    results = of_type(found, "result")
    return results[-1]["num_turns"] if results and whole(results[-1].get("num_turns")) else None


def stream_json_outcome(
    exit_code: int | None,
    output: str,
    usage: dict[str, str],
    turns: Callable[[list[dict[str, Any]]], int | None],
) -> Outcome:
    """For CLIs that write Claude Code's stream of events and end it with one `result`."""
    found = events(output)
    results = of_type(found, "result")
    last = results[-1] if results else {}
    failed = last.get("is_error") is True or text_of(last, "subtype").startswith("error")
    error = (text_of(last, "error", "message") or text_of(last, "result") or text_of(last, "subtype")) if failed else ""
    blocks = [b for e in of_type(found, "assistant", "user") for b in _blocks(e)]
    denials = last.get("permission_denials")
    denied = denials if isinstance(denials, list) else []
    if denied and exit_code == 0:
        # Something beside the policy (a rule of the task's folder, say) kept it from what it was about to do.
        names = ", ".join(sorted({text_of(d, "tool_name") for d in denied}))
        error = error or f"exit code 0 after denied tools: {names[:MAX_NOTE]}"
    notes: dict[str, Any] = {
        "turns": turns(found),
        "tool_calls": count(blocks, lambda b: b.get("type") == "tool_use"),
        "tool_errors": count(blocks, lambda b: b.get("type") == "tool_result" and b.get("is_error") is True),
        "denied_tools": len(denied),
        "stop_reason": text_of(last, "stop_reason"),
        "end": text_of(last, "subtype"),
        "usage": numbers(last.get("usage"), usage),
    }
    outcome = ended(exit_code, output, answered=bool(results), error=error, notes=notes)
    if text_of(last, "subtype") == "error_max_turns" and ended_by_itself(exit_code):
        outcome.termination = "turn_limit"
    return outcome


def _blocks(event: dict[str, Any]) -> list[dict[str, Any]]:
    message = event.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _settings(s: Settings, room: Limits, agent: AgentSpec, endpoint: Endpoint) -> dict[str, Any]:
    generation: dict[str, Any] = {
        "timeout": PATIENCE * 1000,
        "streamIdleTimeoutMs": 0,
        "maxRetries": 8,
        "contextWindowSize": room.window,
        "customHeaders": {"X-Qwen-Session": "${session_id}"},
    }
    if not s.thinking:
        generation["reasoning"] = False
    elif s.effort:
        generation["reasoning"] = {"effort": s.effort}
    base = endpoint.base_url + ("/v1" if s.dialect.startswith("openai") else "")
    model = {"id": MODEL, "name": MODEL, "baseUrl": base, "envKey": _KEY[s.dialect], "generationConfig": generation}
    key = "openai" if s.dialect.startswith("openai") else _AUTH[s.dialect]
    if s.dialect == "openai_responses":
        model["wireApi"] = "responses"
    settings: dict[str, Any] = {
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "gitCoAuthor": {"commit": False, "pr": False}},
        "security": {"auth": {"selectedType": _AUTH[s.dialect]}, "folderTrust": {"enabled": False}},
        "outboundCorrelation": {"allowDynamicHeaderValues": True},
        "model": {"name": MODEL, "skipNextSpeakerCheck": True, "maxToolCallsPerTurn": 1_000_000},
        "modelProviders": {key: [model]},
        # No calls that aren't the task's, and no rewriting of what a tool said long ago.
        "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False, "enableAutoSkill": False},
        "ui": {"enableFollowupSuggestions": False},
        "context": {"clearContextOnIdle": {"toolResultsThresholdMinutes": -1, "toolResultsTotalCharsThreshold": -1}},
        # As for a prompt on its command line: from a terminal it loses the end of what a quick command prints.
        "tools": {"shell": {"enableInteractiveShell": False}},
    }
    if s.allowed_tools is not None:
        settings["tools"]["core"] = s.allowed_tools
    if agent.mcp_servers:
        settings["mcpServers"] = gemini_like_mcp(agent)
    return settings


def gemini_like_mcp(agent: AgentSpec) -> dict[str, Any]:
    """MCP servers as Gemini CLI and its descendants name them, without questions."""
    servers: dict[str, Any] = {}
    for m in agent.mcp_servers:
        if m.transport == "stdio":
            servers[m.name] = {**stdio(m), "trust": True}
        else:
            servers[m.name] = {"url" if m.transport == "sse" else "httpUrl": m.url, "trust": True}
    return servers
