"""`pi`: the pi coding agent (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness_adapters.cli import (
    MODEL,
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

HOME = "~/.polar/pi"
_API = {
    "openai_chat": "openai-completions",
    "openai_responses": "openai-responses",
    "anthropic": "anthropic-messages",
    "google": "google-generative-ai",
}
_USAGE = {"input": "prompt_tokens", "output": "sampled_tokens", "cacheRead": "cached_tokens"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`thinking` off: pi asks for none. `dialect` is the API that it speaks."""

    dialect: Literal["openai_chat", "openai_responses", "anthropic", "google"] = "openai_chat"
    effort: Literal["minimal", "low", "medium", "high"] | None = None
    thinking: bool = True
    allowed_tools: list[str] | None = None
    system_prompt_append: str | None = None


class Pi:
    name = "pi"
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        self._read(agent)

    def _read(self, agent: AgentSpec) -> Settings:
        mcp_servers(agent, self.name, sse=False)
        link_skills(agent, HOME)
        return cli_settings(agent, Settings, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s = self._read(agent)
        room = limits(s, endpoint)
        words = ["pi", "-p", "--mode", "json", "--provider", "polar", "--model", MODEL]
        words += ["--thinking", (s.effort or "medium") if s.thinking else "off", "--no-approve"]
        if s.allowed_tools is not None:
            words += ["--tools", ",".join(s.allowed_tools)] if s.allowed_tools else ["--no-tools"]
        if s.system_prompt_append:
            words += ["--append-system-prompt", f"{HOME}/append.md"]
        files = [
            _json("models.json", _models(s, room, endpoint)),
            _json("settings.json", _settings(room)),
            *([File(path=f"{HOME}/append.md", content=s.system_prompt_append)] if s.system_prompt_append else []),
            *([_json("mcp.json", _mcp(agent))] if agent.mcp_servers else []),
        ]
        defaults = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
        return launch(
            self.name,
            words,
            settings=s,
            instruction=instruction,
            setup=['export PI_CODING_AGENT_DIR="$HOME"/.polar/pi', *link_skills(agent, f"{HOME}/skills")],
            env=with_defaults(defaults, agent, {"POLAR_API_KEY": endpoint.api_key}),
            files=files,
            artifacts=[f"{HOME}/sessions"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        turns = [e for e in found if e.get("type") == "turn_end" and isinstance(e.get("message"), dict)]
        last = turns[-1]["message"] if turns else {}
        calls = [e for e in found if e.get("type") == "tool_execution_end"]
        error = text_of(last, "errorMessage") if last.get("stopReason") in ("error", "aborted") else ""
        notes: dict[str, Any] = {
            "turns": len(turns),
            "tool_calls": len(calls),
            "tool_errors": count(calls, lambda e: e.get("isError") is True),
            "stop_reason": text_of(last, "stopReason"),
            "compactions": count(found, lambda e: e.get("type") == "compaction_end"),
            "retries": count(found, lambda e: e.get("type") == "auto_retry_start"),
            "usage": _sum([numbers(t["message"].get("usage"), _USAGE) for t in turns]),
        }
        answered = last.get("stopReason") in ("stop", "length")
        partial = not any(e.get("type") == "session" for e in found)
        return ended(exit_code, output, answered=answered, error=error, notes=notes, partial=partial)


def _models(s: Settings, room: Limits, endpoint: Endpoint) -> dict[str, Any]:
    anthropic_or_google = s.dialect in ("anthropic", "google")
    base = endpoint.base_url + ("" if s.dialect == "anthropic" else "/v1beta" if s.dialect == "google" else "/v1")
    compat: dict[str, Any] = {} if anthropic_or_google else {"sendSessionAffinityHeaders": True}
    if s.dialect == "openai_chat":
        compat |= {"supportsStore": False, "maxTokensField": "max_tokens", "supportsDeveloperRole": False}
    model = {
        "id": MODEL,
        "reasoning": s.thinking,
        "contextWindow": room.window,
        "maxTokens": room.output,
        "cost": {"input": 0, "output": 0, "cacheRead": 0, "cacheWrite": 0},
    }
    provider = {
        "baseUrl": base,
        "api": _API[s.dialect],
        "apiKey": "$POLAR_API_KEY",
        "compat": compat,
        "models": [model],
    }
    return {"providers": {"polar": provider}}


def _settings(room: Limits) -> dict[str, Any]:
    return {
        "httpIdleTimeoutMs": 0,
        "retry": {"maxRetries": 8},
        "enableInstallTelemetry": False,
        "cacheWarming": "off",
        "compaction": {"reserveTokens": room.output, "keepRecentTokens": max(1, min(20000, room.window // 5))},
    }


def _mcp(agent: AgentSpec) -> dict[str, Any]:
    servers = {}
    for m in agent.mcp_servers:
        if m.transport == "stdio":
            server: dict[str, Any] = {"command": m.command, "args": m.args, "env": m.env}
        else:
            server = {"url": m.url}
        servers[m.name] = {**server, "exposure": "direct"}  # else its tools are only found by a search
    return {"mcpServers": servers}


def _json(name: str, value: Any) -> File:
    return File(path=f"{HOME}/{name}", content=json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def _sum(parts: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({k for p in parts for k in p})
    return {k: sum(p.get(k, 0) for p in parts) for k in names}
