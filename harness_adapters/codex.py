"""`codex`: the Codex CLI (verified with the version in versions.toml), unattended, over the Responses API."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness_adapters.cli import MODEL, PATIENCE, CliAdapter, CliSettings, Limits, limits, stdio
from harness_adapters.events import count, ended, events, last_at, numbers, of_type, text_of
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec

HOME = "~/.polar/codex"
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "sampled_tokens", "cached_input_tokens": "cached_tokens"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`bare`: without subagents, goals and skill search, for small models. `max_output_tokens` only says how much of the
    window is kept free: the CLI sends no limit."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    bare: bool = False


class Codex(CliAdapter):
    name = "codex"
    dialects = ("openai_responses",)
    settings = Settings
    skills = f"{HOME}/skills"
    sse = False

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        config = _config(s, limits(s, endpoint), agent, endpoint)
        words = ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json", "-"]
        return self.launch(
            words,
            s,
            agent,
            instruction,
            setup=['export CODEX_HOME="$HOME"/.polar/codex'],
            defaults={"NO_COLOR": "1"},
            fixed={"POLAR_API_KEY": endpoint.api_key},
            files=[File(path=f"{HOME}/config.toml", content=toml(config))],
            artifacts=[f"{HOME}/sessions"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        done = of_type(found, "turn.completed")
        error = ""
        if (failed := last_at(found, "turn.failed")) > last_at(found, "turn.completed"):
            error = text_of(found[failed], "error", "message") or "the turn failed"
        items = [e["item"] for e in of_type(found, "item.completed") if isinstance(e.get("item"), dict)]
        tools = [i for i in items if i.get("type") not in ("agent_message", "reasoning", "error", "todo_list")]
        started = of_type(found, "thread.started")
        notes: dict[str, Any] = {
            "thread": text_of(started[0], "thread_id") if started else "",
            "messages": count(items, lambda i: i.get("type") == "agent_message"),
            "tool_calls": len(tools),
            "tool_errors": count(tools, lambda i: i.get("status") == "failed"),
            "usage": numbers(done[-1].get("usage"), _USAGE) if done else {},
        }
        return ended(exit_code, output, answered=bool(done), error=error, notes=notes)


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
            m.name: stdio(m) if m.transport == "stdio" else {"url": m.url} for m in agent.mcp_servers
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
