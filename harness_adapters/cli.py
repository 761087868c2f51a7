"""What the adapters of agent CLIs share: their common settings, and a launch line that keeps secrets and the task out of it.

Every CLI is started by a small shell line: only the shell knows HOME. The instruction comes on standard input, which
bounds neither its size nor shows it in process listings. Configuration and transcripts live below ~/.polar, out of the
working directory that is judged. A bundle mounted at /opt/polar/<harness> is found before what the image has itself.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from harness_adapters.common import read_settings
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, LaunchPlan
from polar.task import AgentSpec, McpServer

BUNDLES = "/opt/polar"
# A name that no CLI knows, since they change their dialect for names that they do know; nor does the model table, and that
# means the session's own model.
MODEL = "polar-model"
ARGUMENT_LIMIT = 120 * 1024  # of a command line that one shell takes; the system's is 128 KiB
PATIENCE = 3600  # seconds that a CLI may wait for the model: the session's deadline is the one that counts
Tokens = Annotated[int, Meta(ge=1)]


class CliSettings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Shared by all CLIs. `context_window` and `max_output_tokens` in tokens: by default the model's window, and a quarter of
    it. `extra_args` are appended as they are."""

    command: Annotated[str, Meta(min_length=1)] | None = None
    context_window: Tokens | None = None
    max_output_tokens: Tokens | None = None
    extra_args: list[str] = field(default_factory=list)


class Limits(Struct, frozen=True):
    """Tokens. `compact_at` is where a CLI should compact: an answer must still fit behind it."""

    window: int
    output: int

    @property
    def compact_at(self) -> int:
        return max(1, self.window - self.output)


def limits(settings: CliSettings, endpoint: Endpoint) -> Limits:
    """Raises InvalidTask if the two don't fit each other."""
    window = settings.context_window or endpoint.context_length
    if window > endpoint.context_length:
        raise InvalidTask(f"agent.settings.context_window: found {window}, the model has {endpoint.context_length}")
    output = settings.max_output_tokens or max(1, min(window // 4, 32000))
    if output >= window:
        raise InvalidTask(
            f"agent.settings.max_output_tokens: found {output}, allowed is less than the window ({window})"
        )
    return Limits(window, output)


def cli_settings(agent: AgentSpec, typ: Any, harness: str) -> Any:
    settings = read_settings(agent, typ, harness)
    try:
        json.dumps(agent.settings, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise InvalidTask(f"agent.settings: is no valid Unicode text: {e.reason}") from e
    for arg in [settings.command or "", *settings.extra_args]:
        if "\0" in arg:
            raise InvalidTask("agent.settings: a NUL character can't be given to a command")
    return settings


def launch(
    harness: str,
    words: list[str],
    *,
    settings: CliSettings,
    instruction: str,
    env: dict[str, str],
    setup: list[str] | None = None,
    **plan: Any,
) -> LaunchPlan:
    """`words` (the command's default name first) as a launch plan. A word that begins with `~/` is below HOME. `setup` are
    shell commands before it; `env` is what the CLI needs, over which the task's own environment has no say."""
    command = settings.command or words[0]
    line = " ".join([word(command), *(word(w) for w in words[1:]), *(shlex.quote(a) for a in settings.extra_args)])
    if len(line.encode()) > ARGUMENT_LIMIT:
        raise InvalidTask(
            f"agent.settings: the command line has {len(line.encode())} bytes, allowed are {ARGUMENT_LIMIT}"
        )
    path = f'PATH="{BUNDLES}/{harness}/bin:$PATH"; export PATH'
    _check_text(instruction)
    return LaunchPlan(
        argv="; ".join([path, *(setup or []), f"exec {line}"]),
        env=env,
        stdin=instruction,
        version_argv=["/bin/sh", "-c", f"{path}; exec {word(command)} --version"],
        **plan,
    )


def word(text: str) -> str:
    """One word of a shell line; only a leading `~/` means HOME."""
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") else shlex.quote(text)


def with_defaults(defaults: dict[str, str], agent: AgentSpec, fixed: dict[str, str]) -> dict[str, str]:
    """Defaults, which the task may change; then what it may not: the way to the model."""
    return {**defaults, **agent.env, **fixed}


def link_skills(agent: AgentSpec, place: str) -> list[str]:
    """Shell commands that make the sandbox's folder of skills appear at `place` (below HOME)."""
    if agent.skills_path is None:
        return []
    if "\0" in agent.skills_path or not agent.skills_path:
        raise InvalidTask("agent.skills_path: is no path")
    parent = place.rpartition("/")[0]
    source = agent.skills_path
    target = word(source) if source.startswith(("/", "~/")) else f'"$PWD"/{shlex.quote(source)}'
    return [f"mkdir -p {word(parent)}", f"ln -sfn {target} {word(place)}"]


def mcp_servers(
    agent: AgentSpec, harness: str, pattern: str = r"[A-Za-z0-9_-]{1,64}", sse: bool = True
) -> list[McpServer]:
    """The task's MCP servers, checked. Raises InvalidTask or UnsupportedSpec naming the server."""
    seen: set[str] = set()
    for i, server in enumerate(agent.mcp_servers):
        where = f"agent.mcp_servers[{i}]"
        if not re.fullmatch(pattern, server.name):
            raise InvalidTask(f"{where}.name: found '{server.name}', allowed by the '{harness}' harness: {pattern}")
        if server.name in seen:
            raise InvalidTask(f"{where}.name: '{server.name}' is there twice")
        seen.add(server.name)
        if server.transport == "sse" and not sse:
            raise UnsupportedSpec(
                f"{where}.transport: the '{harness}' harness can't use 'sse', only stdio, streamable-http"
            )
    return agent.mcp_servers


def _check_text(instruction: str) -> None:
    if "\0" in instruction:
        raise InvalidTask("instruction: a NUL character can't be given to an agent")
    if not instruction.strip():
        raise InvalidTask("instruction: is empty; the agent CLI would refuse it")
    try:
        instruction.encode()
    except UnicodeEncodeError as e:
        raise InvalidTask(f"instruction: is no valid Unicode text: {e.reason}") from e
