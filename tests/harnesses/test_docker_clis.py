"""The same CLIs in Docker sandboxes: mounted read-only into an image that knows nothing of them, and built into one."""

from __future__ import annotations

from typing import Any

import pytest

from harness_adapters.registry import load_adapter
from harness_adapters.versions import versions
from polar.config import Settings
from polar.launch import Endpoint
from polar.sandbox import Sandbox
from polar.task import AgentSpec, RuntimeSpec
from runtimes.docker import DockerRuntime
from tests.harnesses.cases import BUILT, BUILT_ALL, MOUNTED, MULTI, SMALL, Case
from tests.harnesses.clis import ALL
from tests.harnesses.deployment import Deployment, missing
from tests.harnesses.images import BASE, built, has_image
from tests.harnesses.report import reported
from tests.harnesses.running import check, finish, script
from workers.version import ask

pytestmark = [pytest.mark.harness, pytest.mark.docker, pytest.mark.timeout(400)]
ENDPOINT = Endpoint(base_url="http://127.0.0.1:1/s/none", api_key="none", model="policy")


def _mounted(case: Case):
    marks = [] if case.scenario is MULTI else [pytest.mark.slow]
    return pytest.param(case, id=case.id, marks=marks)


def _in_image(image: str, case: Case):
    marks = [] if image in SMALL else [pytest.mark.slow]
    return pytest.param(image, case, id=f"{image}-{case.cli.id}", marks=marks)


@pytest.fixture(scope="module", autouse=True)
def docker(tmp_path_factory) -> DockerRuntime:
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path_factory.mktemp("docker"))))
    if not (found := runtime.available())[0]:
        pytest.skip(f"no Docker engine: {found[1]}")
    if not has_image(BASE):
        pytest.skip(f"no image {BASE} (compose/base_image.py makes it)")
    return runtime


def run(case: Case, row: dict[str, Any], deployment: Deployment, key: str, image: str, mount: bool) -> None:
    task = deployment.in_image(**script(case.cli, case.scenario, deployment, key), image=image, mount=mount)
    done, _ = finish(case.cli, case.scenario, key, deployment, task, False)
    row |= done.row
    check(done)


@pytest.mark.parametrize("case", [_mounted(case) for case in MOUNTED])
def test_mounted_into_a_foreign_image(case, deployment, key, report):
    if why := missing(case.cli.harness):
        pytest.skip(why)
    with reported(case, report) as row:
        run(case, row, deployment, key, BASE, mount=True)


@pytest.mark.parametrize(
    ("image", "case"), [*(_in_image(c.cli.harness, c) for c in BUILT), *(_in_image("all", c) for c in BUILT_ALL)]
)
def test_built_into_an_image(image, case, deployment, key, report):
    with reported(case, report) as row:
        run(case, row, deployment, key, built(image), mount=False)


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
