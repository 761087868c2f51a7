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

from harness_adapters.cli import BUNDLES, MODEL, with_defaults
from harness_adapters.common import by_exit_code, last_lines, openai_env, read_settings, refuse_extensions
from polar.errors import InvalidTask
from polar.launch import Endpoint, File, LaunchPlan, Outcome
from polar.task import AgentSpec

CONFIG = ".polar/mini.yaml"  # below HOME
TRAJECTORY = ".polar/mini.traj.json"
REQUEST_TIMEOUT = 3600  # seconds: the session's deadline is the one that counts
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
# JSON is YAML but for characters that YAML readers refuse, or take for line ends, unless they are escaped.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


class Settings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`config` is a configuration file that mini-swe-agent finds; `model_class` e.g. litellm_response. It has no window of its
    own: what doesn't fit the model's ends the run."""

    command: Annotated[str, Meta(min_length=1)] = "mini"
    config: Annotated[str, Meta(min_length=1)] = "mini.yaml"
    step_limit: Annotated[int, Meta(ge=0)] = 0
    model_class: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    effort: str | None = None
    extra_args: list[str] = field(default_factory=list)


class MiniSweAgent:
    name = "mini_swe_agent"
    dialects = ("openai_chat", "openai_responses")
    requires_completions = True

    def check(self, agent: AgentSpec) -> None:
        read_settings(agent, Settings, self.name)
        refuse_extensions(agent, self.name)

    def plan(self, agent: AgentSpec, instruction: str, endpoint: Endpoint) -> LaunchPlan:
        self.check(agent)
        settings = read_settings(agent, Settings, self.name)
        kwargs: dict[str, Any] = {"timeout": REQUEST_TIMEOUT}
        if settings.max_output_tokens:
            kwargs["max_tokens"] = settings.max_output_tokens
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
        return LaunchPlan(
            # The shell is there for HOME, which the adapter doesn't know.
            argv=f'PATH="{BUNDLES}/{self.name}/bin:$PATH"; exec {words} -c "$HOME/{CONFIG}" -o "$HOME/{TRAJECTORY}" {extra}'.rstrip(),
            env=with_defaults(_DEFAULTS, agent, openai_env(endpoint)),
            files=[File(path=f"~/{CONFIG}", content=_yaml(config))],
            version_argv=[settings.command, "--help"],
            artifacts=[f"~/{TRAJECTORY}"],
        )

    def outcome(self, exit_code: int | None, output: str) -> Outcome:
        result = by_exit_code(exit_code, output)
        if exit_code == 0:
            ends = _EXIT.findall(output)
            status = ends[-1].strip() if ends else ""
            if status in _ENDS:
                result.termination = _ENDS[status]  # type: ignore[assignment]
                result.message = f"mini-swe-agent ended with {status}"
                result.notes["exit_status"] = status
        elif exit_code is not None and "ContextWindowExceededError" in output:
            result = Outcome(termination="context_overflow", message=last_lines(output))
        return result


def _yaml(config: dict) -> str:
    try:
        text = json.dumps(config, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as e:
        raise InvalidTask(f"instruction: is no valid Unicode text: {e.reason}") from e
    return _UNSAFE.sub(lambda m: f"\\u{ord(m[0]):04x}", text)
