"""`mini_swe_agent`: the mini-swe-agent CLI (verified with 2.4.6), unattended.

Task and settings go in by a configuration file: an argument would bound the instruction's size and show it in process
listings. The trajectory goes to the agent's HOME, out of the working directory that is judged.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Annotated, Any

from msgspec import Meta, Struct, field

from harness_adapters.cli import (
    BUNDLES,
    MODEL,
    PATIENCE,
    CliSettings,
    Text,
    Tokens,
    check_instruction,
    check_line,
    limits,
    version_argv,
    with_defaults,
)
from harness_adapters.common import (
    ANY_ENDPOINT,
    by_exit_code,
    ended_by_itself,
    last_lines,
    openai_env,
    read_settings,
    refuse_extensions,
)
from harness_adapters.events import cut_off, known
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec

CONFIG = ".polar/mini.yaml"  # below HOME
TRAJECTORY = ".polar/mini.traj.json"
# How the CLI announces an end that its exit code (0) doesn't tell.
_ENDS = {
    "LimitsExceeded": "turn_limit",
    "TimeExceeded": "agent_timeout",
    "RepeatedFormatError": "agent_error",
}
_DEFAULTS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "TERM": "dumb",
    "COLUMNS": "200",
}
_EXIT = re.compile(r"^Exit:[ \t]*\n(.*)$", re.M)
_SAVED = re.compile(r"^Saved trajectory to '[^\n]*\n?\Z", re.M)
_STEP = re.compile(r"^mini-swe-agent \(step (\d{1,9}), \$", re.M)
_RESULT = re.compile(
    r"^(?:Tool|Function_call_output):\n<returncode>\n(-?\d{1,9})\n(<output>\n\n<exception_info>\naction was not executed$)?",
    re.M,
)
# JSON is YAML but for characters that YAML readers refuse, or take for line ends, unless they are escaped.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class Settings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`config` is a configuration file that mini-swe-agent finds; `model_class` e.g. litellm_response. It has no window of its
    own: what doesn't fit the model's ends the run."""

    command: Text = "mini"
    config: Text = "mini.yaml"
    step_limit: Annotated[int, Meta(ge=0)] = 0
    model_class: Text | None = None
    max_output_tokens: Tokens | None = None
    effort: Text | None = None
    extra_args: list[str] = field(default_factory=list)


class MiniSweAgent:
    name = "mini_swe_agent"
    dialects = ("openai_chat", "openai_responses")
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        self.plan(agent, "any", ANY_ENDPOINT)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        settings = read_settings(agent, Settings, self.name)
        refuse_extensions(agent, self.name)
        check_instruction(instruction)
        kwargs: dict[str, Any] = {"timeout": PATIENCE}
        if settings.max_output_tokens:
            kwargs["max_tokens"] = limits(CliSettings(max_output_tokens=settings.max_output_tokens), endpoint).output
        if settings.effort:
            kwargs["reasoning_effort"] = settings.effort
        model: dict[str, Any] = {
            "model_name": f"openai/{MODEL}",
            "model_kwargs": kwargs,
            "cost_tracking": "ignore_errors",
        }
        if settings.model_class:
            model["model_class"] = settings.model_class
        config = {
            "run": {"task": instruction},
            "agent": {"mode": "yolo", "confirm_exit": False, "cost_limit": 0, "step_limit": settings.step_limit},
            "model": model,
        }
        words = shlex.join([settings.command, "-c", settings.config])
        extra = shlex.join(settings.extra_args)
        # The shell is there for HOME, which the adapter doesn't know.
        path = f'PATH="{BUNDLES}/{self.name}/bin:$PATH"'
        line = f'exec {words} -c "$HOME/{CONFIG}" -o "$HOME/{TRAJECTORY}" {extra}'.rstrip()
        return LaunchPlan(
            argv=check_line(f"{path}; {line}"),
            env=with_defaults(_DEFAULTS, agent, openai_env(endpoint)),
            files=[File(path=f"~/{CONFIG}", content=_yaml(config))],
            version_argv=version_argv(path, shlex.quote(settings.command)),
            artifacts=[f"~/{TRAJECTORY}"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        result = by_exit_code(exit_code, output)
        notes = _counted(output)
        if exit_code == 0:
            ends = _EXIT.findall(output)
            status = ends[-1].strip() if ends else ""
            if status in _ENDS:
                result.termination = _ENDS[status]  # type: ignore[assignment]
                result.message = f"mini-swe-agent ended with {status}"
                notes["exit_status"] = status
            # What it submits stands behind the block, and may be longer than what is kept of the output.
            elif not ends and not (cut_off(output) and _SAVED.search(output)):
                result = Outcome(termination="agent_error", message="exit code 0 without its 'Exit:' block")
        elif ended_by_itself(exit_code) and "ContextWindowExceededError" in last_lines(output, 4000):
            result = Outcome(termination="context_overflow", message=last_lines(output))
        result.notes = known(notes, output)
        return result


def _counted(output: str) -> dict[str, Any]:
    """What its words tell, as far as they do: another `config` may have other ones for a tool's result."""
    steps, results = _STEP.findall(output), _RESULT.findall(output)
    notes: dict[str, Any] = {"turns": int(steps[-1])} if steps else {}
    if results:
        notes["tool_calls"] = len(results)
        # The command that submits is no command that failed, though it says so.
        notes["tool_errors"] = sum(1 for code, submits in results if code != "0" and not submits)
    return notes


def _yaml(config: dict) -> str:
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(config, ensure_ascii=False))
