"""Validation plans the launch with what it will really get: the task's instruction and the window of its model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from harness_adapters.versions import versions
from polar.codec import convert
from polar.config import Model, Settings
from polar.errors import InvalidTask
from polar.task import AgentSpec, RuntimeSpec, TaskRequest
from submission import validate

CLIS = sorted(versions().harnesses)
PAGES = sorted(p for p in Path(__file__).parents[2].glob("docs/**/*.md"))
DEFAULTS = Settings(models={"policy": Model(engine="http://e", tokenizer="t")})
NO_TABLE = Settings()


def task(harness: str, instruction: str = "Do it.", **agent) -> TaskRequest:
    return TaskRequest(instruction=instruction, agent=AgentSpec(harness=harness, **agent))


def models(**windows: int) -> Settings:
    return Settings(models={n: Model(engine="http://e", tokenizer="t", context_length=w) for n, w in windows.items()})


@pytest.mark.parametrize("settings", [NO_TABLE, DEFAULTS], ids=["no table", "defaults"])
@pytest.mark.parametrize("harness", CLIS)
def test_an_instruction_that_no_cli_takes(harness, settings):
    assert validate(task(harness), settings) == "local"
    for empty in ("", " \n"):
        with pytest.raises(InvalidTask, match=r"^instruction: found no text, allowed is "):
            validate(task(harness, empty), settings)


def test_an_instruction_too_long_for_its_place_in_the_command():
    command = "my-agent {{INSTRUCTION}}"
    validate(task("shell", "x" * 100_000, command=command), NO_TABLE)
    with pytest.raises(
        InvalidTask, match=r"^agent\.command: with the instruction it has 2\d{5} bytes, allowed are \d+"
    ):
        validate(task("shell", "x" * 200_000, command=command), NO_TABLE)
    validate(task("shell", "x" * 200_000, command="my-agent"), NO_TABLE)  # it comes on standard input
    validate(task("shell", "", command="my-agent"), NO_TABLE)


@pytest.mark.parametrize("harness", [c for c in CLIS if c != "mini_swe_agent"])
def test_a_window_that_its_own_model_does_not_have(harness):
    settings = models(policy=32768, large=131072)
    wide = {"context_window": 65536}
    with pytest.raises(InvalidTask, match=r"^agent\.settings\.context_window: found 65536, the model has 32768"):
        validate(task(harness, settings=wide), settings)
    with pytest.raises(InvalidTask, match=r"found 65536, the model has 32768"):
        validate(task(harness, settings=wide, model_name="a name for the default"), settings)
    validate(task(harness, settings=wide, model_name="large"), settings)
    validate(task(harness, settings=wide), NO_TABLE)
    with pytest.raises(InvalidTask, match=r"^agent\.settings\.max_output_tokens: found 32768, allowed is less"):
        validate(task(harness, settings={"max_output_tokens": 32768}), settings)


def test_a_model_that_no_row_stands_for():
    settings = models(small=8192, large=32768)
    with pytest.raises(InvalidTask, match=r"^agent\.model_name: found 'policy', allowed: large, small \("):
        validate(task("pi"), settings)
    validate(task("pi", model_name="small"), settings)


def agents() -> list:
    """The agent section of every task in the pages."""
    found = []
    for page in PAGES:
        for n, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)):
            data = yaml.safe_load(block)
            if isinstance(data, dict) and "agent" in data:
                found.append(pytest.param(data["agent"], id=f"{page.stem}-{n}"))
    assert found
    return found


@pytest.mark.parametrize("settings", [NO_TABLE, DEFAULTS], ids=["no table", "defaults"])
@pytest.mark.parametrize("agent", agents())
def test_what_the_pages_show_can_be_submitted_by_a_reader_who_set_nothing(agent, settings):
    spec = convert(agent, AgentSpec, "agent")
    assert validate(TaskRequest(instruction="Do it.", agent=spec, runtime=RuntimeSpec()), settings) == "local"
