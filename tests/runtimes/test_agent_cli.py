"""A real agent CLI, unmodified, through the whole stack on each back-end: what comes out is the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polar.task import RetryPolicy, RuntimeSpec, TaskRequest, Volume
from runtimes import apptainer_cli, bwrap
from runtimes.apptainer import SHELF_VARIABLE
from tests.harnesses.clis import PI
from tests.harnesses.deployment import INSIDE, Deployment, bundles, missing
from tests.harnesses.scenarios import SCENARIOS
from tests.harnesses.scripted_engine import ScriptedEngine
from tests.proxy import toy_tokenizer
from tests.runtimes.conftest import IMAGE, apptainer_base, docker_missing, ensure_image

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
(MULTI,) = [s for s in SCENARIOS if s.name == "multi_turn"]
BACKENDS = ["local-plain", "local-bwrap", "docker", "apptainer"]


def absent(backend: str) -> str:
    if backend == "local-bwrap":
        found: Any = bwrap.find()
    elif backend == "apptainer":
        found = apptainer_cli.find()
    else:
        found = docker_missing() or None if backend == "docker" else None
    return found if isinstance(found, str) else ""


def spec(backend: str, bundle: Path) -> RuntimeSpec:
    volumes = [Volume(source=str(bundle), target=f"{INSIDE}/{bundle.name}")]
    if backend == "local-plain":
        return RuntimeSpec(backend="local", options={"isolation": "none"})
    if backend == "local-bwrap":
        return RuntimeSpec(backend="local", options={"isolation": "bwrap"}, volumes=volumes)
    return RuntimeSpec(backend=backend, image=IMAGE, volumes=volumes, workdir="/work")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    if why := missing(PI.harness):
        pytest.skip(why)
    tokenizer = toy_tokenizer.build(tmp_path_factory.mktemp("tokenizer"))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="polar-agents-", dir="/var/tmp") as folder,
        ScriptedEngine(tokenizer) as engine,
    ):
        os.chmod(folder, 0o755)
        if not absent("docker"):
            ensure_image()
        if not absent("apptainer"):
            (shelf := Path(folder, "shelf")).mkdir()
            (shelf / IMAGE.replace(":", "_")).symlink_to(apptainer_base())
            patch.setenv(SHELF_VARIABLE, str(shelf))
        with Deployment(Path(folder), engine, tokenizer) as deployment:
            yield deployment


def outcome(deployment: Deployment, backend: str) -> dict[str, Any]:
    root = bundles()
    assert root is not None
    runtime, key = spec(backend, root / PI.harness), f"agent-on-{BACKENDS.index(backend)}"
    deployment.engine.policy.scripts[key] = MULTI.script(PI, key)
    task: TaskRequest = deployment.task(
        key, PI.harness, MULTI.instruction.replace("KEY", key), watched=False, artifacts=list(MULTI.files)
    )
    agent = task.agent
    if backend == "local-plain":
        agent = msgspec.structs.replace(agent, settings={"command": str(root / PI.harness / "bin" / "pi")})
    task = msgspec.structs.replace(task, runtime=runtime, agent=agent, retry=RetryPolicy(max_attempts=1))
    result, _ = deployment.run(task, watched=False)
    captured = deployment.captured(result)
    said = deployment.artifact(result, "agent.log")[-1500:].decode("utf-8", "replace")
    assert result.error is None, (result.error, said)
    return {
        "termination": result.termination,
        "files": {name: deployment.artifact(result, name).decode() for name in MULTI.files},
        "turns": len(captured),
        "traces": len(result.trajectory.traces),
        "sampled": [len(c.sampled_ids) for c in captured],
    }


def test_the_same_on_every_back_end(deployment):
    found = {b: outcome(deployment, b) for b in BACKENDS if not absent(b)}
    if len(found) < 2:
        pytest.skip("; ".join(f"{b}: {why}" for b in BACKENDS if (why := absent(b))))
    first = next(iter(found.values()))
    assert first["termination"] == "finished" and first["files"] == MULTI.files and first["turns"] >= MULTI.min_turns
    assert all(one == first for one in found.values()), found
