"""A harness whose program, and how it is asked for its version, are shell commands of the task."""

from __future__ import annotations

from harness_adapters.common import by_exit_code, openai_env
from polar.launch import Endpoint, LaunchPlan, Outcome
from polar.task import AgentSpec


class VersionedAgent:
    name = "versioned"
    dialects = ("openai_chat",)
    requires_completions = False

    def check(self, agent: AgentSpec) -> None: ...

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        s = agent.settings
        return LaunchPlan(
            argv=s.get("run", "true"), version_argv=s["version"], env=openai_env(endpoint) | {"QUIET": "1"}
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        outcome = by_exit_code(exit_code, output)
        outcome.notes["version"] = "what the agent says"
        return outcome
