"""`opencode`: the opencode CLI (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

import json
import shlex
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

HOME = "~/.polar/opencode"
# Its data folder has no variable of its own but XDG's, which would be the agent's commands' too.
STORAGE = "~/.local/share/opencode"
# It asks npm's registry for its plugin package in every configuration folder, unless a lock file says that it is there.
_LOCK = '{"packages":{"":{"dependencies":{"@opencode-ai/plugin":"*"}}}}'
_NO_INSTALL = (
    'for d in "$HOME"/.polar/opencode "${XDG_CONFIG_HOME:-$HOME/.config}"/opencode; do mkdir -p "$d"/node_modules; '
    f'[ -e "$d"/package-lock.json ] || printf %s {shlex.quote(_LOCK)} > "$d"/package-lock.json; done'
)
_NPM = {
    "openai_chat": "@ai-sdk/openai-compatible",
    "openai_responses": "@ai-sdk/openai",
    "anthropic": "@ai-sdk/anthropic",
}
_USAGE = {"input": "prompt_tokens", "output": "sampled_tokens", "reasoning": "reasoning_tokens"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`allowed_tools`: all others are switched off."""

    dialect: Literal["openai_chat", "openai_responses", "anthropic"] = "openai_chat"
    effort: Literal["low", "medium", "high"] | None = None
    thinking: bool = True
    allowed_tools: list[str] | None = None
    system_prompt_append: str | None = None


class Opencode:
    name = "opencode"
    dialects = ("openai_chat", "openai_responses", "anthropic")
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        self._read(agent)

    def _read(self, agent: AgentSpec) -> Settings:
        mcp_servers(agent, self.name)
        link_skills(agent, f"{HOME}/skills")
        return cli_settings(agent, Settings, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s = self._read(agent)
        config = _config(s, limits(s, endpoint), agent, endpoint)
        files = [File(path=f"{HOME}/config.json", content=json.dumps(config, indent=1, ensure_ascii=False) + "\n")]
        if s.system_prompt_append:
            files.append(File(path=f"{HOME}/append.md", content=s.system_prompt_append))
        defaults = {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_SHARE": "1",
            "OPENCODE_DISABLE_PRUNE": "1",  # it would rewrite what old tools said
        }
        return launch(
            self.name,
            # With a title of its own it asks the model for none.
            ["opencode", "run", "--title", "task", "--format", "json"],
            settings=s,
            instruction=instruction,
            setup=[
                'export OPENCODE_CONFIG="$HOME"/.polar/opencode/config.json OPENCODE_CONFIG_DIR="$HOME"/.polar/opencode',
                _NO_INSTALL,
                *link_skills(agent, f"{HOME}/skills"),
            ],
            env=with_defaults(defaults, agent, {"POLAR_API_KEY": endpoint.api_key}),
            files=files,
            artifacts=[f"{STORAGE}/opencode.db", f"{STORAGE}/opencode.db-wal"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        finishes = [e["part"] for e in found if e.get("type") == "step_finish" and isinstance(e.get("part"), dict)]
        tools = [e for e in found if e.get("type") == "tool_use"]
        errors = [e for e in found if e.get("type") == "error"]
        last = finishes[-1] if finishes else {}
        error = ""
        # An error after which it went on was one that it could mend.
        if errors and (
            not finishes
            or found.index(errors[-1]) > max(i for i, e in enumerate(found) if e.get("type") == "step_finish")
        ):
            error = text_of(errors[-1], "error", "data", "message") or text_of(errors[-1], "error", "name") or "error"
        usage = [numbers(f.get("tokens"), _USAGE) for f in finishes]
        notes: dict[str, Any] = {
            "turns": len(finishes),
            "tool_calls": len(tools),
            "tool_errors": count(tools, lambda e: text_of(e, "part", "state", "status") == "error"),
            "stop_reason": text_of(last, "reason"),
            "usage": {k: sum(u.get(k, 0) for u in usage) for k in sorted({k for u in usage for k in u})},
        }
        return ended(
            exit_code, output, answered=text_of(last, "reason") in ("stop", "length"), error=error, notes=notes
        )


def _config(s: Settings, room: Limits, agent: AgentSpec, endpoint: Endpoint) -> dict[str, Any]:
    model: dict[str, Any] = {
        "name": MODEL,
        "tool_call": True,
        "reasoning": s.thinking,
        "limit": {"context": room.window, "output": room.output},
    }
    if s.dialect == "openai_chat" and s.thinking:
        model["interleaved"] = {"field": "reasoning_content"}
    if s.effort and s.thinking:
        model["options"] = {"reasoningEffort": s.effort}
    options = {"baseURL": f"{endpoint.base_url}/v1", "apiKey": "{env:POLAR_API_KEY}", "timeout": PATIENCE * 1000}
    config: dict[str, Any] = {
        "autoupdate": False,
        "share": "disabled",
        "permission": "allow",
        "model": f"polar/{MODEL}",
        "small_model": f"polar/{MODEL}",
        "enabled_providers": ["polar"],
        "provider": {"polar": {"npm": _NPM[s.dialect], "name": "polar", "options": options, "models": {MODEL: model}}},
        "compaction": {"auto": True, "prune": False},
        "formatter": False,
        "lsp": False,
    }
    if s.system_prompt_append:
        config["instructions"] = [f"{HOME}/append.md"]
    if s.allowed_tools is not None:
        config["tools"] = {"*": False, **{t: True for t in s.allowed_tools}}
    if agent.mcp_servers:
        config["mcp"] = {
            m.name: {"type": "local", "command": [m.command, *m.args], "environment": m.env, "enabled": True}
            if m.transport == "stdio"
            else {"type": "remote", "url": m.url, "enabled": True}
            for m in agent.mcp_servers
        }
    return config
