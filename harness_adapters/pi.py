"""`pi`: the pi coding agent (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness_adapters.cli import MODEL, CliAdapter, CliSettings, Limits, ListedTool, json_file, limits, stdio
from harness_adapters.events import count, ended, events, of_type, text_of, total
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec, McpServer

HOME = "~/.polar/pi"
_API = {
    "openai_chat": "openai-completions",
    "openai_responses": "openai-responses",
    "anthropic": "anthropic-messages",
    "google": "google-generative-ai",
}
_AGENT_END = tuple(f'],"willRetry":{will}}}' for will in ("false", "true"))
_USAGE = {"input": "prompt_tokens", "output": "sampled_tokens", "cacheRead": "cached_tokens"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`thinking` off: pi asks for none. `dialect` is the API that it speaks."""

    dialect: Literal["openai_chat", "openai_responses", "anthropic", "google"] = "openai_chat"
    effort: Literal["minimal", "low", "medium", "high"] | None = None
    allowed_tools: list[ListedTool] | None = None


class Pi(CliAdapter):
    name = "pi"
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    settings = Settings
    skills = f"{HOME}/skills"
    sse = False

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        room = limits(s, endpoint)
        words = ["pi", "-p", "--mode", "json", "--provider", "polar", "--model", MODEL]
        words += ["--thinking", (s.effort or "medium") if s.thinking else "off", "--no-approve"]
        if s.allowed_tools is not None:
            words += ["--tools", ",".join(s.allowed_tools)] if s.allowed_tools else ["--no-tools"]
        files = [
            json_file(f"{HOME}/models.json", _models(s, room, endpoint)),
            json_file(f"{HOME}/settings.json", _settings(room)),
        ]
        if s.system_prompt_append:
            words += ["--append-system-prompt", f"{HOME}/append.md"]
            files.append(File(path=f"{HOME}/append.md", content=s.system_prompt_append))
        if agent.mcp_servers:
            files.append(json_file(f"{HOME}/mcp.json", _mcp(agent)))
        defaults = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
        return self.launch(
            words,
            s,
            agent,
            instruction,
            setup=['export PI_CODING_AGENT_DIR="$HOME"/.polar/pi'],
            defaults=defaults,
            fixed={"POLAR_API_KEY": endpoint.api_key},
            files=files,
            artifacts=[f"{HOME}/sessions"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        turns = [e["message"] for e in of_type(found, "turn_end") if isinstance(e.get("message"), dict)]
        last = turns[-1] if turns else _last_message(output)
        calls = of_type(found, "tool_execution_end")
        error = text_of(last, "errorMessage") if last.get("stopReason") in ("error", "aborted") else ""
        notes: dict[str, Any] = {
            "turns": len(turns),
            "tool_calls": len(calls),
            "tool_errors": count(calls, lambda e: e.get("isError") is True),
            "stop_reason": text_of(last, "stopReason"),
            "compactions": len(of_type(found, "compaction_end")),
            "retries": len(of_type(found, "auto_retry_start")),
            "usage": total((t.get("usage") for t in turns), _USAGE),
        }
        answered = last.get("stopReason") in ("stop", "length")
        return ended(exit_code, output, answered=answered, error=error, notes=notes)


def _last_message(output: str) -> dict[str, Any]:
    """The answer at the end of the last `agent_end`, {} if there is none. That event repeats every message of the run, so in a
    long one it is all that is left of the output, and its own beginning is cut off."""
    line = next((x for x in reversed(output.split("\n")) if x.endswith(_AGENT_END)), "")
    # In a string its quotes would be escaped: this is where a message begins.
    at = line.rfind('{"role":"assistant",')
    if at < 0:
        return {}
    try:
        message, end = json.JSONDecoder().raw_decode(line, at)
    except (ValueError, RecursionError):
        return {}
    return message if line[end:] in _AGENT_END else {}


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
    def server(m: McpServer) -> dict[str, Any]:
        # Without the exposure its tools are only found by a search.
        return {**(stdio(m) if m.transport == "stdio" else {"url": m.url}), "exposure": "direct"}

    return {"mcpServers": {m.name: server(m) for m in agent.mcp_servers}}
