"""`shell`: any agent that a shell command starts. It finds the task and the model in its environment.

`agent.command` may contain {{INSTRUCTION}}, which becomes the instruction as one quoted word. The environment has
POLAR_INSTRUCTION, POLAR_MODEL, POLAR_CONTEXT_LENGTH, and base URL, key and model under the names that OpenAI, Anthropic
and Google clients read. Standard input is empty, since many CLIs add it to their prompt; only an instruction too large for
the environment (128 KiB) comes on it.
"""

from __future__ import annotations

import shlex

from msgspec import Struct

from harness_adapters.common import by_exit_code, check_text, every_env, read_settings, refuse_extensions
from polar.errors import InvalidTask
from polar.launch import Endpoint, LaunchPlan, Outcome
from polar.task import AgentSpec

PLACEHOLDER = "{{INSTRUCTION}}"
# Linux bounds one argument or environment entry to 128 KiB, its name and end included.
ARGUMENT_LIMIT = 128 * 1024 - 64


class Settings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The shell harness has no settings."""


class Shell:
    name = "shell"
    dialects = ("openai_chat", "openai_responses", "anthropic", "google")
    requires_completions = False  # any command: it may have nothing to ask

    def check(self, agent: AgentSpec) -> None:
        read_settings(agent, Settings, self.name)
        refuse_extensions(agent, self.name)
        if not agent.command:
            raise InvalidTask("agent.command: the 'shell' harness needs one")
        check_text(agent.command, "agent.command")

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        self.check(agent)
        command = agent.command or ""
        check_text(instruction, "instruction")
        filled = command.replace(PLACEHOLDER, shlex.quote(instruction))
        small = len(instruction.encode()) < ARGUMENT_LIMIT
        if len(filled.encode()) > ARGUMENT_LIMIT:
            raise InvalidTask(
                f"agent.command: with the instruction it has {len(filled.encode())} bytes, allowed are {ARGUMENT_LIMIT}; "
                "read the instruction from standard input instead"
            )
        env = {
            **every_env(endpoint),
            "POLAR_MODEL": endpoint.model,
            "POLAR_CONTEXT_LENGTH": str(endpoint.context_length),
        }
        if small:
            env["POLAR_INSTRUCTION"] = instruction
        return LaunchPlan(argv=filled, env=env, stdin=None if small else instruction)

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        return by_exit_code(exit_code, output)
