"""`codex`: the Codex CLI (verified with the version in versions.toml), unattended, over the Responses API."""

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

HOME = "~/.polar/codex"
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "sampled_tokens", "cached_input_tokens": "cached_tokens"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`bare`: without subagents, goals and skill search, for small models. `max_output_tokens` only says how much of the
    window is kept free: the CLI sends no limit."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    thinking: bool = True
    system_prompt_append: str | None = None
    bare: bool = False


class Codex:
    name = "codex"
    dialects = ("openai_responses",)
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        self._read(agent)

    def _read(self, agent: AgentSpec) -> Settings:
        mcp_servers(agent, self.name, sse=False)
        link_skills(agent, f"{HOME}/skills")
        return cli_settings(agent, Settings, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s = self._read(agent)
        config = _config(s, limits(s, endpoint), agent, endpoint)
        words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "-"]
        return launch(
            self.name,
            words,
            settings=s,
            instruction=instruction,
            setup=['export CODEX_HOME="$HOME"/.polar/codex', *link_skills(agent, f"{HOME}/skills")],
            env=with_defaults({"NO_COLOR": "1"}, agent, {"POLAR_API_KEY": endpoint.api_key}),
            files=[File(path=f"{HOME}/config.toml", content=toml(config))],
            artifacts=[f"{HOME}/sessions"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        done = [e for e in found if e.get("type") == "turn.completed"]
        failed = [e for e in found if e.get("type") == "turn.failed"]
        error = ""
        if failed and (not done or found.index(failed[-1]) > found.index(done[-1])):
            error = text_of(failed[-1], "error", "message") or "the turn failed"
        items = [e["item"] for e in found if e.get("type") == "item.completed" and isinstance(e.get("item"), dict)]
        tools = [i for i in items if i.get("type") not in ("agent_message", "reasoning", "error", "todo_list")]
        notes: dict[str, Any] = {
            "thread": next((text_of(e, "thread_id") for e in found if e.get("type") == "thread.started"), ""),
            "messages": count(items, lambda i: i.get("type") == "agent_message"),
            "tool_calls": len(tools),
            "tool_errors": count(tools, lambda i: i.get("status") == "failed"),
            "usage": numbers(done[-1].get("usage"), _USAGE) if done else {},
        }
        partial = not any(e.get("type") == "thread.started" for e in found)
        return ended(exit_code, output, answered=bool(done), error=error, notes=notes, partial=partial)


def _config(s: Settings, room: Limits, agent: AgentSpec, endpoint: Endpoint) -> dict[str, Any]:
    features = {
        "plugins": False,
        "apps": False,
        "unbounded_connection_retries": False,  # else a dead endpoint means waiting for ever
    }
    if s.bare:
        features |= {"multi_agent": False, "goals": False, "skill_search": False}
    config: dict[str, Any] = {
        "model": MODEL,
        "model_provider": "polar",
        "approval_policy": "never",
        "sandbox_mode": "danger-full-access",
        "model_context_window": room.window,
        "model_auto_compact_token_limit": room.compact_at,
        "check_for_update_on_startup": False,
        "web_search": "disabled",
        "model_reasoning_summary": "auto" if s.thinking else "none",
    }
    if s.effort or not s.thinking:
        config["model_reasoning_effort"] = s.effort or "none"
    if s.system_prompt_append:
        config["developer_instructions"] = s.system_prompt_append
    config["features"] = features
    config["analytics"] = {"enabled": False}
    config["feedback"] = {"enabled": False}
    config["model_providers"] = {
        "polar": {
            "name": "polar",
            "base_url": f"{endpoint.base_url}/v1",
            "env_key": "POLAR_API_KEY",
            "wire_api": "responses",
            "stream_idle_timeout_ms": PATIENCE * 1000,
            "request_max_retries": 8,
            "stream_max_retries": 8,
        }
    }
    if agent.mcp_servers:
        config["mcp_servers"] = {
            m.name: {"command": m.command, "args": m.args, "env": m.env} if m.transport == "stdio" else {"url": m.url}
            for m in agent.mcp_servers
        }
    return config


def toml(data: dict[str, Any], prefix: str = "") -> str:
    """The few TOML shapes that the configuration has. JSON's strings are TOML's, but for DEL."""
    lines = [f"{_key(k)} = {_value(v)}" for k, v in data.items() if not isinstance(v, dict)]
    for k, v in data.items():
        if isinstance(v, dict):
            name = f"{prefix}{_key(k)}"
            inner = toml(v, f"{name}.")
            lines.append(f"\n[{name}]\n{inner}" if any(not isinstance(x, dict) for x in v.values()) or not v else inner)
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_value(v) for v in value)}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
