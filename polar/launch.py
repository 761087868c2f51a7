"""The harness contract: an adapter turns an agent spec and a proxy endpoint into a launch plan. No I/O of its own."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from msgspec import Struct, field

from polar.result import Termination
from polar.task import AgentSpec


class Endpoint(Struct, frozen=True, kw_only=True):
    """The model endpoint as the agent sees it.

    `base_url` already contains the capability (`http://…/s/<capability>`): Anthropic and Google clients take it as it
    is, OpenAI clients take `base_url + "/v1"`. `api_key` is the same capability for clients that only know a key.
    """

    base_url: str
    api_key: str
    model: str
    context_length: int = 32768


class File(Struct, frozen=True, kw_only=True):
    """`path` inside the sandbox; `~/` stands for the agent's HOME."""

    path: str
    content: str
    mode: int = 0o600


class LaunchPlan(Struct, kw_only=True):
    """How to run the agent. `argv` runs without a shell unless it is a string. `artifacts` are paths to collect."""

    argv: list[str] | str
    env: dict[str, str] = field(default_factory=dict)
    files: list[File] = field(default_factory=list)
    stdin: str | None = None
    cwd: str | None = None
    # Prints the program's version without asking a model; exit code 126 or 127 means `harness_missing`, all else is noted.
    version_argv: list[str] | None = None
    artifacts: list[str] = field(default_factory=list)


class Outcome(Struct, kw_only=True, omit_defaults=True):
    """What the adapter read from the CLI's own output."""

    termination: Termination
    message: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class HarnessAdapter(Protocol):
    """`requires_completions`: a run without a single model call is then a failure of the machinery."""

    name: str
    dialects: tuple[str, ...]
    requires_completions: bool

    def check(self, agent: AgentSpec) -> None:
        """Raise InvalidTask naming the setting that is unknown or wrong."""
        ...

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan: ...

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        """Judge how the run ended from exit code and the tail of its output. Budgets are judged by the stage."""
        ...
