"""Plans and verdicts of the adapters. They do no I/O, so neither do these tests but for one shell."""

from __future__ import annotations

import os
import shlex
import subprocess

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness_adapters.mini_swe_agent import MiniSweAgent
from harness_adapters.registry import load_adapter
from harness_adapters.shell import ARGUMENT_LIMIT, Shell
from polar.errors import InvalidTask, UnsupportedSpec
from polar.launch import Endpoint, HarnessAdapter
from polar.task import AgentSpec, McpServer

ENDPOINT = Endpoint(
    base_url="http://127.0.0.1:3128/s/sk-polar-x", api_key="sk-polar-x", model="policy", context_length=4096
)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=200)


def shell(command: str = "run {{INSTRUCTION}}", **kw) -> AgentSpec:
    return AgentSpec(harness="shell", command=command, **kw)


def mini(**settings) -> AgentSpec:
    return AgentSpec(harness="mini_swe_agent", settings=settings)


@pytest.mark.parametrize(("agent", "cls"), [(shell(), Shell), (mini(), MiniSweAgent)])
def test_registry(agent, cls):
    adapter = load_adapter(agent)
    assert isinstance(adapter, cls) and isinstance(adapter, HarnessAdapter) and adapter.name == agent.harness
    adapter.check(agent)
    by_path = AgentSpec(import_path=f"{cls.__module__}:{cls.__name__}")
    assert isinstance(load_adapter(by_path), cls)


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (AgentSpec(harness="claude"), r"agent\.harness.*'claude'.*allowed.*shell"),
        (AgentSpec(import_path="no.such:Thing"), r"agent\.import_path.*no\.such"),
        (AgentSpec(import_path="polar.launch:Outcome"), r"agent\.import_path"),
        (AgentSpec(import_path="builtins:dict"), r"agent\.import_path.*lacks name"),
    ],
)
def test_what_is_no_adapter(agent, message):
    with pytest.raises(InvalidTask, match=message):
        load_adapter(agent)


@pytest.mark.parametrize("agent", [shell(), mini()])
def test_extensions_are_refused(agent):
    adapter = load_adapter(agent)
    for extra in ({"mcp_servers": [McpServer(name="m", command="x")]}, {"skills_path": "skills"}):
        spec = AgentSpec(harness=agent.harness, command=agent.command, **extra)
        for call in (lambda s=spec: adapter.check(s), lambda s=spec: adapter.plan(s, "x", ENDPOINT)):
            with pytest.raises(UnsupportedSpec, match=rf"agent\.{next(iter(extra))}"):
                call()


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (shell(settings={"x": 1}), r"agent\.settings\.x: unknown.*it has none"),
        (mini(steps=3), r"agent\.settings\.steps: unknown.*allowed: .*step_limit"),
        (mini(step_limit=-1), r"agent\.settings\.step_limit"),
        (mini(step_limit="3"), r"agent\.settings\.step_limit"),
        (mini(command=""), r"agent\.settings\.command"),
        (mini(extra_args="-x"), r"agent\.settings\.extra_args"),
    ],
)
def test_settings_are_strict(agent, message):
    with pytest.raises(InvalidTask, match=message):
        load_adapter(agent).check(agent)


# -- shell


def test_shell_plan():
    plan = Shell().plan(shell(), 'it\'s "quoted" $HOME', ENDPOINT)
    assert shlex.split(plan.argv) == ["run", 'it\'s "quoted" $HOME']
    base = ENDPOINT.base_url
    assert (
        plan.env["OPENAI_BASE_URL"] == f"{base}/v1"
        and plan.env["ANTHROPIC_BASE_URL"] == plan.env["GOOGLE_GEMINI_BASE_URL"] == base
    )
    assert {plan.env[k] for k in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "GEMINI_API_KEY")} == {"sk-polar-x"}
    assert (plan.env["POLAR_MODEL"], plan.env["POLAR_INSTRUCTION"]) == ("policy", 'it\'s "quoted" $HOME')
    assert plan.stdin is None and plan.files == [] and "sk-polar-x" not in plan.argv


@given(TEXT)
def test_shell_hands_the_instruction_over_as_it_is(instruction):
    plan = Shell().plan(shell('printf %s {{INSTRUCTION}}; printf "|%s" "$POLAR_INSTRUCTION"'), instruction, ENDPOINT)
    env = {"PATH": os.environ["PATH"], **plan.env}
    out = subprocess.run(["sh", "-c", plan.argv], env=env, capture_output=True, check=True).stdout
    assert out == f"{instruction}|{instruction}".encode()


def test_shell_with_a_huge_instruction():
    huge = "x" * (ARGUMENT_LIMIT + 1)
    plan = Shell().plan(shell("run -"), huge, ENDPOINT)
    assert plan.stdin == huge and "POLAR_INSTRUCTION" not in plan.env
    with pytest.raises(InvalidTask, match=r"agent\.command.*standard input"):
        Shell().plan(shell(), huge, ENDPOINT)


@pytest.mark.parametrize(("adapter", "nothing"), [(Shell(), "finished"), (MiniSweAgent(), "agent_error")])
def test_outcome_by_exit_code(adapter, nothing):
    """Without a word of its own, too, which mini-swe-agent has for each end that it came to by itself."""
    assert adapter.outcome(0, "whatever").termination == nothing
    failed = adapter.outcome(3, "long ago\n" + "x" * 1000 + "the end\n")
    assert failed.termination == "agent_error" and failed.message.startswith("exit code 3: ")
    assert failed.message.endswith("the end") and len(failed.message) < 500
    assert adapter.outcome(None, "").termination == "agent_error"
    assert "no output" in adapter.outcome(1, " \n").message


# -- mini-swe-agent


@given(TEXT.filter(str.strip))
def test_mini_config_is_yaml_that_says_the_same(instruction):
    plan = MiniSweAgent().plan(mini(step_limit=7, model_class="litellm_response"), instruction, ENDPOINT)
    (file,) = plan.files
    config = yaml.safe_load(file.content)
    assert config["run"]["task"] == instruction
    assert config["agent"] == {"mode": "yolo", "confirm_exit": False, "cost_limit": 0, "step_limit": 7}
    assert (
        config["model"]["model_name"] == "openai/polar-model" and config["model"]["model_class"] == "litellm_response"
    )


def test_mini_plan():
    plan = MiniSweAgent().plan(mini(command="/opt/my venv/mini", extra_args=["--x", "a b"]), "secret task", ENDPOINT)
    assert isinstance(plan.argv, str)
    words = shlex.split(plan.argv.partition("; ")[2])
    assert words[:2] == ["exec", "/opt/my venv/mini"] and words[-2:] == ["--x", "a b"]
    assert "secret task" not in plan.argv and "sk-polar-x" not in plan.argv
    assert plan.env["OPENAI_BASE_URL"] == f"{ENDPOINT.base_url}/v1" and plan.env["OPENAI_API_KEY"] == "sk-polar-x"
    assert plan.files[0].path.startswith("~/") and plan.files[0].path[2:] in plan.argv and plan.files[0].mode == 0o600
    assert plan.artifacts[0].startswith("~/") and plan.artifacts[0][2:] in plan.argv
    assert plan.version_argv and plan.version_argv[-1].endswith("exec '/opt/my venv/mini' --version")


@pytest.mark.parametrize(
    ("code", "output", "termination"),
    [
        (0, "\nExit:\nLimitsExceeded\nSaved trajectory to 'x'\n", "turn_limit"),
        (0, "\nExit:\nTimeExceeded\n", "agent_timeout"),
        (0, "\nExit:\nRepeatedFormatError\n", "agent_error"),
        (0, "\nExit:\nLimitsExceeded\n…\nExit:\nthe submission\n\n", "finished"),
        (0, "Tool:\nExit: LimitsExceeded\n\nExit:\n\nSaved trajectory to 'x'", "finished"),
        (1, "litellm.ContextWindowExceededError: too long", "context_overflow"),
        (1, "Exit:\nLimitsExceeded", "agent_error"),
    ],
)
def test_mini_outcome(code, output, termination):
    assert MiniSweAgent().outcome(code, output).termination == termination


def test_mini_notes():
    def tool(code: int, more: str = "") -> str:
        return f"Tool:\n<returncode>\n{code}\n<output>\n{more}\n"

    steps = [f"\nmini-swe-agent (step {n}, $0.00):\nLet me see.\n\n```\nls\n```\n\n" for n in (1, 2, 3)]
    submits = tool(-1, "\n<exception_info>\naction was not executed")
    timeout = tool(-1, "\n<exception_info>\nAn error occurred while executing the command")
    output = "".join(
        [steps[0], tool(0, "a"), steps[1], tool(3, "no such file"), timeout, steps[2], submits, "\nExit:\n\n"]
    )
    good = MiniSweAgent().outcome(0, output)
    assert (good.termination, good.notes) == ("finished", {"turns": 3, "tool_calls": 4, "tool_errors": 2})
    # Another configuration of it may word what a tool said otherwise: that is unknown, not 0.
    assert MiniSweAgent().outcome(1, steps[0] + "Tool:\nfine\n").notes == {"turns": 1}
