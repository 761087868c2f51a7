"""The same CLIs in Docker sandboxes: mounted read-only into an image that knows nothing of them, and built into one."""

from __future__ import annotations

import pytest

from harness_adapters.registry import load_adapter
from harness_adapters.versions import versions
from polar.config import Settings
from polar.launch import Endpoint
from polar.sandbox import Sandbox
from polar.task import AgentSpec, RuntimeSpec
from runtimes.docker import DockerRuntime
from tests.harnesses.clis import ALL, Cli
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.images import BASE, built, has_image
from tests.harnesses.running import check, finish, pairs, script
from tests.harnesses.scenarios import SCENARIOS, Scenario
from workers.version import ask

pytestmark = [pytest.mark.harness, pytest.mark.docker, pytest.mark.timeout(400)]
(MULTI,) = [s for s in SCENARIOS if s.name == "multi_turn"]
# Of every other CLI and of the image with all of them: when there is time for it.
SMALL = ("pi", "mini_swe_agent")
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/s/none", api_key="none", model="policy")


def _case(cli: Cli, scenario: Scenario):
    marks = [] if scenario is MULTI else [pytest.mark.slow]
    return pytest.param(cli, scenario, id=f"{cli.id}-{scenario.name}", marks=marks)


def _in_image(harness: str, cli: Cli):
    marks = [] if harness in SMALL else [pytest.mark.slow]
    return pytest.param(harness, cli, id=f"{harness}-{cli.id}", marks=marks)


@pytest.fixture(scope="module", autouse=True)
def docker(tmp_path_factory) -> DockerRuntime:
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path_factory.mktemp("docker"))))
    if not (found := runtime.available())[0]:
        pytest.skip(f"no Docker engine: {found[1]}")
    if not has_image(BASE):
        pytest.skip(f"no image {BASE} (compose/base_image.py makes it)")
    return runtime


def run(cli: Cli, scenario: Scenario, deployment: Deployment, key: str, image: str, mount: bool) -> None:
    task = deployment.in_image(**script(cli, scenario, deployment, key), image=image, mount=mount)
    check(finish(cli, scenario, key, deployment, task, False)[0])


@pytest.mark.parametrize(("cli", "scenario"), [_case(cli, s) for cli, s in pairs(ALL)])
def test_mounted_into_a_foreign_image(cli, scenario, deployment, key):
    if why := missing(cli.harness):
        pytest.skip(why)
    run(cli, scenario, deployment, key, BASE, mount=True)


@pytest.mark.parametrize(
    ("harness", "cli"),
    [*(_in_image(cli.harness, cli) for cli in ALL), *(_in_image("all", c) for c in ALL if c.harness in SMALL)],
)
def test_built_into_an_image(harness, cli, deployment, key):
    run(cli, MULTI, deployment, key, built(harness), mount=False)


@pytest.mark.slow
def test_the_image_of_all_has_each_at_its_pinned_version(docker):
    spec = RuntimeSpec(backend="docker", image=built("all"), network="none")
    sandbox = docker.create(spec, labels={}, proxy=None, timeout=60)
    try:
        found = {cli.harness: _version(sandbox, cli.harness) for cli in ALL}
    finally:
        sandbox.destroy()
    assert found == {name: h.version for name, h in versions().harnesses.items()}


def _version(sandbox: Sandbox, harness: str) -> str:
    plan = load_adapter(AgentSpec(harness=harness)).plan(AgentSpec(harness=harness), "none", ENDPOINT)
    return ask(sandbox, harness, plan, plan.env, 60, lambda: False).get("version", "")
