"""The same CLIs in Docker sandboxes: mounted read-only into an image that knows nothing of them, and built into one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from runtimes.docker import DockerRuntime
from tests.harnesses.clis import ALL, Cli
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.report import measure
from tests.harnesses.scenarios import SCENARIOS, Scenario

pytestmark = [pytest.mark.harness, pytest.mark.docker, pytest.mark.timeout(400)]
BASE = "polar-sandbox:base"
(MULTI,) = [s for s in SCENARIOS if s.name == "multi_turn"]
CASES = [
    pytest.param(cli, s, id=f"{cli.id}-{s.name}", marks=[] if s is MULTI else [pytest.mark.slow])
    for cli in ALL
    for s in SCENARIOS
    if cli.runs(s.name, s.needs(cli))
]


def has_image(image: str) -> bool:
    docker = shutil.which("docker")
    return (
        docker is not None and not subprocess.run([docker, "image", "inspect", image], capture_output=True).returncode
    )


def check(cli: Cli, scenario: Scenario, deployment: Deployment, key: str, image: str, mount: bool) -> None:
    if not (found := DockerRuntime(deployment.settings).available())[0]:
        pytest.skip(f"no Docker engine: {found[1]}")
    if not has_image(image):
        pytest.skip(f"no image {image}")
    engine = deployment.engine
    engine.policy.scripts[key] = scenario.script(cli, key)
    settings = {"context_window": cli.window} if scenario.name == "compaction" else {}
    task = deployment.in_image(
        key,
        cli.harness,
        scenario.instruction.replace("KEY", key),
        image,
        mount,
        settings=settings,
        artifacts=list(scenario.files),
        **scenario.task(cli),
    )
    result, _ = deployment.run(task, watched=False)
    captured = deployment.captured(result)
    row = measure(cli, scenario, key, result, captured, engine, None)
    said = deployment.artifact(result, "agent.log")[-2000:].decode("utf-8", "replace")
    assert result.termination == scenario.termination, (row, result.error, said)
    for name, text in scenario.files.items():
        assert deployment.artifact(result, name).decode() == text, row
    assert row["sampled_tokens"] == row["captured_tokens"] == row["accounted_tokens"], row
    assert row["turns"] >= scenario.min_turns and row["chains"] >= scenario.min_chains, row
    if scenario.append_only:
        assert row["continuity"] >= 0.95, row


@pytest.mark.parametrize(("cli", "scenario"), CASES)
def test_mounted_into_a_foreign_image(cli, scenario, deployment, key):
    if why := missing(cli.harness):
        pytest.skip(why)
    check(cli, scenario, deployment, key, BASE, mount=True)


@pytest.mark.parametrize("cli", ALL, ids=lambda cli: cli.id)
def test_built_into_an_image(cli, deployment, key):
    image = f"polar-sandbox:{cli.harness}"
    if not has_image(image):
        pytest.skip(f"no image {image} (polar images build {cli.harness})")
    check(cli, MULTI, deployment, key, image, mount=False)
