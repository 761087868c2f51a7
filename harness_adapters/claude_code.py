"""`claude_code`: Claude Code (verified with the version in versions.toml), unattended, over Anthropic Messages."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from msgspec import Meta

from harness_adapters.cli import MODEL, PATIENCE, CliAdapter, CliSettings, ListedTool, limits, stdio
from harness_adapters.events import of_type, text_of
from harness_adapters.qwen_code import stream_json_outcome
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec

HOME = "~/.polar/claude"
_USAGE = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "sampled_tokens",
    "cache_read_input_tokens": "cached_tokens",
}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`allowed_tools`: the built-in tools that exist at all. `bare`: the CLI's minimal mode, for small models."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    allowed_tools: list[ListedTool] | None = None
    max_turns: Annotated[int, Meta(ge=1)] | None = None
    bare: bool = False


class ClaudeCode(CliAdapter):
    name = "claude_code"
    dialects = ("anthropic",)
    settings = Settings
    skills = f"{HOME}/skills"
    effort_is_thinking = False  # it also bounds how much it says and does

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        room = limits(s, endpoint)
        words = ["claude", "-p", "--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        words += ["--strict-mcp-config"]  # of the servers that the image or the project names, none is the task's
        words += ["--bare"] if s.bare else []
        words += ["--effort", s.effort] if s.effort else []
        words += ["--max-turns", str(s.max_turns)] if s.max_turns else []
        words += ["--tools", ",".join(s.allowed_tools)] if s.allowed_tools is not None else []
        files = []
        if s.system_prompt_append:
            words += ["--append-system-prompt-file", f"{HOME}/append.md"]
            files.append(File(path=f"{HOME}/append.md", content=s.system_prompt_append))
        if agent.mcp_servers:
            words += ["--mcp-config", f"{HOME}/mcp.json"]
            files.append(File(path=f"{HOME}/mcp.json", content=json.dumps(_mcp(agent), indent=1) + "\n"))
        defaults = {
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would change with every call
            "API_TIMEOUT_MS": str(PATIENCE * 1000),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": str(PATIENCE * 1000),
            "CLAUDE_CODE_MAX_RETRIES": "10",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(room.output),
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(room.window),
            # Compaction by the window that the model really has; its own minimum is 100k.
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(room.window),
            **({} if s.thinking else {"MAX_THINKING_TOKENS": "0", "CLAUDE_CODE_DISABLE_THINKING": "1"}),
        }
        fixed = {
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_SONNET_MODEL": MODEL,
            "ANTHROPIC_DEFAULT_OPUS_MODEL": MODEL,
            "CLAUDE_CODE_SUBAGENT_MODEL": MODEL,
        }
        return self.launch(
            words,
            s,
            agent,
            instruction,
            setup=['export CLAUDE_CONFIG_DIR="$HOME"/.polar/claude'],
            defaults=defaults,
            fixed=fixed,
            files=files,
            artifacts=[f"{HOME}/projects"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        return stream_json_outcome(exit_code, output, _USAGE, _turns)


def _turns(found: list[dict[str, Any]]) -> int:
    """Of the main agent: not all of a subagent's answers are told. Each part of an answer is an event with the answer's id.
    (`num_turns` of its `result` counts tool calls.)"""
    main = [e for e in of_type(found, "assistant") if not text_of(e, "parent_tool_use_id")]
    return len({text_of(e, "message", "id") for e in main} - {""})


def _mcp(agent: AgentSpec) -> dict[str, Any]:
    servers: dict[str, Any] = {}
    for m in agent.mcp_servers:
        if m.transport == "stdio":
            servers[m.name] = {"type": "stdio", **stdio(m)}
        else:
            servers[m.name] = {"type": "sse" if m.transport == "sse" else "http", "url": m.url}
    return {"mcpServers": servers}
