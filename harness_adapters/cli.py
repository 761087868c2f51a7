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

from msgspec import Meta, Struct, field, to_builtins

from harness_adapters.common import ANY_ENDPOINT, check_text, read_settings
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, File, LaunchPlan
from polar.task import AgentSpec, McpServer

BUNDLES = "/opt/polar"
# A name that no CLI knows, since they change their dialect for names that they do know; nor does the model table, and that
# means the session's own model.
MODEL = "polar-model"
ARGUMENT_LIMIT = 120 * 1024  # of a command line that one shell takes; the system's is 128 KiB
PATH_LIMIT = 4096
PATIENCE = 3600  # seconds that a CLI may wait for the model: the session's deadline is the one that counts
Tokens = Annotated[int, Meta(ge=1, le=1 << 53)]
Text = Annotated[str, Meta(min_length=1)]
ListedTool = Annotated[str, Meta(pattern="^[^,]+$")]  # of CLIs that take one word of names with commas between
_SERVER_NAME = r"[A-Za-z0-9_-]{1,64}"
_OF_STDIO = ("command", "args", "env")


class CliSettings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Shared by all CLIs. `context_window` and `max_output_tokens` in tokens: by default the model's window, and a quarter of
    it. `extra_args` are appended as they are. Each CLI has its own words for `effort`."""

    command: Text | None = None
    context_window: Tokens | None = None
    max_output_tokens: Tokens | None = None
    extra_args: list[str] = field(default_factory=list)
    effort: str | None = None
    thinking: bool = True
    system_prompt_append: str | None = None


class CliAdapter:
    """What such an adapter does but for `plan` and `outcome`. `skills`: the folder where the CLI looks for them. `sse`: it
    knows that transport of MCP. `effort_is_thinking`: its effort says nothing where it is not to think."""

    name: str
    dialects: tuple[str, ...]
    requires_completions = True
    settings: type[CliSettings]
    skills: str
    sse = True
    effort_is_thinking = True

    def check(self, agent: AgentSpec) -> None:
        self.plan(agent, "any", ANY_ENDPOINT)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        raise NotImplementedError

    def read(self, agent: AgentSpec) -> Any:
        """The settings. Raises InvalidTask or UnsupportedSpec for what they or the MCP servers can't be."""
        _check_mcp(agent.mcp_servers, self.name, self.sse)
        s = read_settings(agent, self.settings, self.name)
        if self.effort_is_thinking and not s.thinking and s.effort not in (None, "none"):
            raise InvalidTask(f"agent.settings.effort: found '{s.effort}', allowed beside thinking false: null")
        return s

    def launch(
        self,
        words: list[str],
        s: CliSettings,
        agent: AgentSpec,
        instruction: str,
        *,
        setup: list[str],
        defaults: dict[str, str],
        fixed: dict[str, str],
        **plan: Any,
    ) -> LaunchPlan:
        """`words` (the command's default name first) as a launch plan. A word that begins with `~/` is below HOME. `setup`
        are shell commands before it; `defaults` and `fixed` as in `with_defaults`."""
        check_instruction(instruction)
        command = word(s.command or words[0])
        path = f'PATH="{BUNDLES}/{self.name}/bin:$PATH"; export PATH'
        line = " ".join([command, *(word(w) for w in words[1:]), *(shlex.quote(a) for a in s.extra_args)])
        return LaunchPlan(
            argv=check_line("; ".join([path, *setup, *_link_skills(agent, self.skills), f"exec {line}"])),
            env=with_defaults(defaults, agent, fixed),
            stdin=instruction,
            version_argv=version_argv(path, command),
            **plan,
        )


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


def version_argv(path: str, command: str) -> list[str]:
    """Prints the version of `command` (a word of a shell line); or, with exit code 127, where it was looked for."""
    missing = f'printf "%s is not there; looked for in %s\\n" {command} "$PATH" >&2; exit 127'
    return ["/bin/sh", "-c", f"{path}; command -v {command} >/dev/null || {{ {missing}; }}; exec {command} --version"]


def word(text: str) -> str:
    """One word of a shell line; only a leading `~/` means HOME."""
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") else shlex.quote(text)


def with_defaults(defaults: dict[str, str], agent: AgentSpec, fixed: dict[str, str]) -> dict[str, str]:
    """Defaults, which the task may change; then what it may not: the way to the model."""
    return {**defaults, **agent.env, **fixed}


def json_file(path: str, value: Any) -> File:
    return File(path=path, content=json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def stdio(server: McpServer) -> dict[str, Any]:
    """A local MCP server as most CLIs name its parts."""
    return {k: getattr(server, k) for k in _OF_STDIO}


def check_line(line: str) -> str:
    if (size := len(line.encode())) > ARGUMENT_LIMIT:
        raise InvalidTask(f"agent.settings: the command line has {size} bytes, allowed are {ARGUMENT_LIMIT}")
    return line


def check_instruction(instruction: str) -> None:
    check_text(instruction, "instruction")
    if not instruction.strip():
        raise InvalidTask("instruction: found no text, allowed is one that isn't blank; the agent CLI would refuse it")


def _link_skills(agent: AgentSpec, place: str) -> list[str]:
    """Shell commands that make the sandbox's folder of skills appear at `place` (below HOME)."""
    source = agent.skills_path
    if source is None:
        return []
    check_text(source, "agent.skills_path")
    if not 0 < (size := len(source.encode())) < PATH_LIMIT:
        raise InvalidTask(f"agent.skills_path: found {size} bytes, allowed is a path of 1 to {PATH_LIMIT - 1}")
    target = word(source) if source.startswith(("/", "~/")) else f'"$PWD"/{shlex.quote(source)}'
    return [f"mkdir -p {word(place.rpartition('/')[0])}", f"ln -sfn {target} {word(place)}"]


def _check_mcp(servers: list[McpServer], harness: str, sse: bool) -> None:
    """Raises InvalidTask or UnsupportedSpec naming the server."""
    seen: set[str] = set()
    for i, server in enumerate(servers):
        where = f"agent.mcp_servers[{i}]"
        check_text(to_builtins(server), where)
        if not re.fullmatch(_SERVER_NAME, server.name):
            raise InvalidTask(
                f"{where}.name: found '{server.name}', allowed by the '{harness}' harness: {_SERVER_NAME}"
            )
        if server.name in seen:
            raise InvalidTask(f"{where}.name: '{server.name}' is there twice")
        seen.add(server.name)
        if server.transport == "sse" and not sse:
            raise UnsupportedSpec(
                f"{where}.transport: the '{harness}' harness can't use 'sse', only stdio, streamable-http"
            )
        needs, others = (_OF_STDIO, ("url",)) if server.transport == "stdio" else (("url",), _OF_STDIO)
        for unused in (k for k in others if getattr(server, k)):
            raise InvalidTask(
                f"{where}.{unused}: found with transport '{server.transport}', allowed: {', '.join(needs)}"
            )
