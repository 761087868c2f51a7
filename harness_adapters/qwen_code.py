"""`qwen_code`: Qwen Code (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness_adapters.cli import (
    MODEL,
    PATIENCE,
    CliSettings,
    Limits,
    cli_settings,
    launch,
    limits,
    link_skills,
    mcp_servers,
    with_defaults,
)
from harness_adapters.events import count, ended, events, numbers, text_of
from polar.launch import Endpoint, File, LaunchPlan, Outcome
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
    thinking: bool = True
    allowed_tools: list[str] | None = None
    system_prompt_append: str | None = None
    bare: bool = False


class QwenCode:
    name = "qwen_code"
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        self._read(agent)

    def _read(self, agent: AgentSpec) -> Settings:
        mcp_servers(agent, self.name)
        link_skills(agent, f"{HOME}/skills")
        return cli_settings(agent, Settings, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s = self._read(agent)
        room = limits(s, endpoint)
        words = ["qwen", "--yolo", "--auth-type", _AUTH[s.dialect], "--model", MODEL]
        words += ["--output-format", "stream-json", "--chat-recording"]
        words += ["--bare"] if s.bare else []
        # A word with a newline in it is fine; only its size is bounded, by the system.
        words += ["--append-system-prompt", s.system_prompt_append] if s.system_prompt_append else []
        settings = _settings(s, room, agent, endpoint)
        defaults = {
            "QWEN_USAGE_STATISTICS_ENABLED": "false",
            "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
            "QWEN_CODE_NO_RELAUNCH": "1",
            "QWEN_CODE_MAX_OUTPUT_TOKENS": str(room.output),
            "NO_COLOR": "1",
        }
        return launch(
            self.name,
            words,
            settings=s,
            instruction=instruction,
            setup=['export QWEN_HOME="$HOME"/.polar/qwen', *link_skills(agent, f"{HOME}/skills")],
            env=with_defaults(defaults, agent, {_KEY[s.dialect]: endpoint.api_key}),
            files=[
                File(path=f"{HOME}/settings.json", content=json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
            ],
            artifacts=[f"{HOME}/projects"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        return stream_json_outcome(exit_code, output, _USAGE)


def stream_json_outcome(exit_code: int | None, output: str, usage: dict[str, str]) -> Outcome:
    """For CLIs that write Claude Code's stream of events and end it with one `result`."""
    found = events(output)
    results = [e for e in found if e.get("type") == "result"]
    last = results[-1] if results else {}
    failed = last.get("is_error") is True or text_of(last, "subtype").startswith("error")
    error = (text_of(last, "error", "message") or text_of(last, "result") or text_of(last, "subtype")) if failed else ""
    blocks = [b for e in found if e.get("type") in ("assistant", "user") for b in _blocks(e)]
    denied = last.get("permission_denials")
    notes: dict[str, Any] = {
        "turns": last.get("num_turns") if isinstance(last.get("num_turns"), int) else count(found, _is_turn),
        "tool_calls": count(blocks, lambda b: b.get("type") == "tool_use"),
        "tool_errors": count(blocks, lambda b: b.get("type") == "tool_result" and b.get("is_error") is True),
        "denied_tools": len(denied) if isinstance(denied, list) else 0,
        "stop_reason": text_of(last, "stop_reason"),
        "end": text_of(last, "subtype"),
        "usage": numbers(last.get("usage"), usage),
    }
    partial = not any(e.get("type") == "system" and text_of(e, "subtype") in ("init", "session_start") for e in found)
    outcome = ended(exit_code, output, answered=bool(results), error=error, notes=notes, partial=partial)
    if text_of(last, "subtype") == "error_max_turns":
        outcome.termination = "turn_limit"
    return outcome


def _blocks(event: dict[str, Any]) -> list[dict[str, Any]]:
    message = event.get("message")
    content = message.get("content") if isinstance(message, dict) else None
    return [b for b in content if isinstance(b, dict)] if isinstance(content, list) else []


def _is_turn(event: dict[str, Any]) -> bool:
    return event.get("type") == "assistant"


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
    }
    if s.allowed_tools is not None:
        settings["tools"] = {"core": s.allowed_tools}
    if agent.mcp_servers:
        settings["mcpServers"] = gemini_like_mcp(agent)
    return settings


def gemini_like_mcp(agent: AgentSpec) -> dict[str, Any]:
    """MCP servers as Gemini CLI and its descendants name them, without questions."""
    servers: dict[str, Any] = {}
    for m in agent.mcp_servers:
        if m.transport == "stdio":
            servers[m.name] = {"command": m.command, "args": m.args, "env": m.env, "trust": True}
        else:
            servers[m.name] = {"url" if m.transport == "sse" else "httpUrl": m.url, "trust": True}
    return servers
