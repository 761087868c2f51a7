"""`opencode`: the opencode CLI (verified with the version in versions.toml), unattended, over Chat Completions by default."""

from __future__ import annotations

import shlex
from typing import Any, Literal

from harness_adapters.cli import MODEL, PATIENCE, CliAdapter, CliSettings, Limits, Text, json_file, limits
from harness_adapters.events import count, cut_off, ended, events, last_at, of_type, text_of, total
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
    allowed_tools: list[Text] | None = None


class Opencode(CliAdapter):
    name = "opencode"
    dialects = ("openai_chat", "openai_responses", "anthropic")
    settings = Settings
    skills = f"{HOME}/skills"

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        files = [json_file(f"{HOME}/config.json", _config(s, limits(s, endpoint), agent, endpoint))]
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
        return self.launch(
            # With a title of its own it asks the model for none.
            ["opencode", "run", "--title", "task", "--format", "json"],
            s,
            agent,
            instruction,
            setup=[
                'export OPENCODE_CONFIG="$HOME"/.polar/opencode/config.json OPENCODE_CONFIG_DIR="$HOME"/.polar/opencode',
                _NO_INSTALL,
            ],
            defaults=defaults,
            fixed={"POLAR_API_KEY": endpoint.api_key},
            files=files,
            artifacts=[f"{STORAGE}/opencode.db", f"{STORAGE}/opencode.db-wal"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        finishes = [e["part"] for e in of_type(found, "step_finish") if isinstance(e.get("part"), dict)]
        tools = of_type(found, "tool_use")
        last = finishes[-1] if finishes else {}
        at, end = last_at(found, "error"), last_at(found, "step_finish")
        error = mended = ""
        if at >= 0:
            error = text_of(found[at], "error", "data", "message") or text_of(found[at], "error", "name") or "error"
        # An error after which it went on was one that it could mend, by a compaction say.
        if at < end:
            error, mended = "", error
        notes: dict[str, Any] = {
            "turns": len(finishes),
            "tool_calls": len(tools),
            "tool_errors": count(tools, _failed),
            "stop_reason": text_of(last, "reason"),
            "usage": total((f.get("tokens") for f in finishes), _USAGE),
        }
        answered = text_of(last, "reason") in ("stop", "length")
        # After any error, mended or not, it exits with 1. A summary ends with "stop", too, but isn't its last word.
        if exit_code == 1 and answered and end == len(found) - 1 and (mended or cut_off(output)):
            notes["mended"] = mended or "an error before the end of the output"
            exit_code = 0
        return ended(exit_code, output, answered=answered, error=error, notes=notes)


def _failed(event: dict[str, Any]) -> bool:
    """A tool that failed, or a command that did: the tool itself is then completed."""
    part = event.get("part")
    state = part.get("state") if isinstance(part, dict) else None
    metadata = state.get("metadata") if isinstance(state, dict) else None
    code = metadata.get("exit") if isinstance(metadata, dict) else None
    return text_of(state, "status") == "error" or (isinstance(code, int) and code != 0)


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
