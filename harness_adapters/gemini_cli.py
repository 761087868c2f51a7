"""`gemini_cli`: Gemini CLI (verified with the version in versions.toml), unattended, over generateContent."""

from __future__ import annotations

import json
from typing import Any, Literal

from harness_adapters.cli import MODEL, PATIENCE, CliAdapter, CliSettings, Limits, Text, limits
from harness_adapters.events import ended, events, numbers, of_type, text_of
from harness_adapters.qwen_code import gemini_like_mcp
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec

HOME = "~/.polar/gemini"  # GEMINI_CLI_HOME: what HOME is otherwise
# Switches of the CLI that have no setting: how long it waits for headers (60 s otherwise), and from how many tokens on it
# rewrites what tools said long ago, which would break every later prompt off its history.
_EXPERIMENTS = {
    "flags": [{"flagId": 45773134, "intValue": str(PATIENCE)}, {"flagId": 45758817, "intValue": "1000000000"}]
}
_BELIEVED_WINDOW = 1_048_576
_USAGE = {"input_tokens": "prompt_tokens", "output_tokens": "sampled_tokens", "cached": "cached_tokens"}
_EXITS = {41: "the CLI found no way to authenticate", 42: "the CLI refused its input", 53: "the CLI's own turn limit"}


class Settings(CliSettings, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """`allowed_tools`: its core tools but for these are not there. In a run of one instruction it never compacts, whatever the
    window; the model's own end is then the run's."""

    effort: Literal["minimal", "low", "medium", "high"] | None = None
    allowed_tools: list[Text] | None = None


class GeminiCli(CliAdapter):
    name = "gemini_cli"
    dialects = ("google",)
    settings = Settings
    skills = f"{HOME}/.gemini/skills"

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s: Settings = self.read(agent)
        settings = _settings(s, limits(s, endpoint), agent)
        files = [
            File(path=f"{HOME}/.gemini/settings.json", content=json.dumps(settings, indent=1) + "\n"),
            File(path=f"{HOME}/experiments.json", content=json.dumps(_EXPERIMENTS) + "\n"),
        ]
        if s.system_prompt_append:  # its memory file is what it adds to its system prompt
            files.append(File(path=f"{HOME}/.gemini/GEMINI.md", content=s.system_prompt_append))
        fixed = {
            "GOOGLE_GEMINI_BASE_URL": endpoint.base_url,
            "GEMINI_API_KEY": endpoint.api_key,
            "GEMINI_MODEL": MODEL,
        }
        return self.launch(
            ["gemini", "--yolo", "--skip-trust", "--model", MODEL, "--output-format", "stream-json"],
            s,
            agent,
            instruction,
            setup=['export GEMINI_CLI_HOME="$HOME"/.polar/gemini GEMINI_EXP="$HOME"/.polar/gemini/experiments.json'],
            defaults={"NO_COLOR": "1", "GEMINI_CLI_NO_RELAUNCH": "true"},
            fixed=fixed,
            files=files,
            artifacts=[f"{HOME}/.gemini/tmp"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        found = events(output)
        results = of_type(found, "result")
        last = results[-1] if results else {}
        error = ""
        if text_of(last, "status") not in ("", "success"):
            error = text_of(last, "error", "message") or text_of(last, "status")
        tools = of_type(found, "tool_result")  # a command that failed is a success here: errors are not told
        notes: dict[str, Any] = {
            "tool_calls": len(tools),
            "end": text_of(last, "status"),
            "usage": numbers(last.get("stats"), _USAGE),
        }
        said = any(e.get("role") == "assistant" for e in of_type(found, "message"))
        # An empty answer, retried until it gave up, ends it with 0 and without a word.
        answered = text_of(last, "status") == "success" and (said or bool(tools))
        outcome = ended(exit_code, output, answered=answered, error=error, notes=notes)
        if exit_code in _EXITS:
            outcome.message = f"exit code {exit_code}: {_EXITS[exit_code]}" + (f": {error}" if error else "")
            if exit_code == 53:
                outcome.termination = "turn_limit"
        return outcome


def _settings(s: Settings, room: Limits, agent: AgentSpec) -> dict[str, Any]:
    generation: dict[str, Any] = {"maxOutputTokens": room.output}
    if not s.thinking:
        generation["thinkingConfig"] = {"includeThoughts": False, "thinkingBudget": 0}
    elif s.effort:
        generation["thinkingConfig"] = {"includeThoughts": True, "thinkingLevel": s.effort.upper()}
    override = {"match": {"model": MODEL}, "modelConfig": {"generateContentConfig": generation}}
    settings: dict[str, Any] = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "enableAutoUpdateNotification": False},
        # Both would ask other models in between.
        "model": {
            "disableLoopDetection": True,
            "skipNextSpeakerCheck": True,
            # A share of the window that it believes in for a name that it doesn't know.
            "compressionThreshold": min(0.5, room.compact_at / _BELIEVED_WINDOW),
        },
        "modelConfigs": {"customOverrides": [override]},
    }
    if s.allowed_tools is not None:
        settings["tools"] = {"core": s.allowed_tools}
    if agent.mcp_servers:
        settings["mcpServers"] = gemini_like_mcp(agent)
    return settings
