"""Real agent CLIs, unmodified, and the quickstart's batch, through the whole stack on each back-end: what comes out is the same."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from cli.demo import pull
from examples.quickstart.batch import QUESTIONS, quickstart
from harness_adapters.versions import versions
from polar.task import RuntimeSpec, Volume
from runtimes import apptainer_cli, bwrap
from runtimes.apptainer import SHELF_VARIABLE
from submission import submit
from tests.harnesses.clis import MINI, PI, Cli
from tests.harnesses.deployment import Deployment, bundles, missing
from tests.harnesses.policy import Decision, Policy
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


def spec(backend: str, volumes: list[Volume]) -> RuntimeSpec:
    if backend == "local-plain":
        return RuntimeSpec(backend="local", options={"isolation": "none"})
    if backend == "local-bwrap":
        return RuntimeSpec(backend="local", options={"isolation": "bwrap"}, volumes=volumes)
    return RuntimeSpec(backend=backend, image=IMAGE, volumes=volumes, workdir="/work")


class Answers(Policy):
    """Also answers the quickstart's questions, by the turn in which one is asked; all that isn't here is answered rightly."""

    turns: ClassVar[dict[str, tuple[str, ...]]] = {
        "capital-of-italy": ("It is a city that one calls Rome", "Rome"),  # too long at first
        "opposite-of-hot": ("Warm",),
        "colour-of-grass": ("As green as it ever was, I think",),  # too long to the end
        "two-plus-two": ("", "Four"),
    }

    def decide(self, prompt: str) -> Decision:
        for name, (question, answer) in QUESTIONS.items():
            if asked := prompt.count(question):
                says = self.turns.get(name, (answer.split("|")[0],))
                return Decision(says[min(asked, len(says)) - 1], name, "main")
        return super().decide(prompt)


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    tokenizer = toy_tokenizer.build(tmp_path_factory.mktemp("tokenizer"))
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(prefix="polar-agents-", dir="/var/tmp") as folder,
        ScriptedEngine(tokenizer) as engine,
    ):
        os.chmod(folder, 0o755)
        engine.policy = Answers()
        if not absent("docker"):
            ensure_image()
        if not absent("apptainer"):
            (shelf := Path(folder, "shelf")).mkdir()
            (shelf / IMAGE.replace(":", "_")).symlink_to(apptainer_base())
            patch.setenv(SHELF_VARIABLE, str(shelf))
        with Deployment(Path(folder), engine, tokenizer) as deployment:
            yield deployment


def on_each(run: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What it leads to, which must be the same on every back-end that is here."""
    found = {b: run(b) for b in BACKENDS if not absent(b)}
    if len(found) < 2:
        pytest.skip("; ".join(f"{b}: {why}" for b in BACKENDS if (why := absent(b))))
    first = next(iter(found.values()))
    assert all(one == first for one in found.values()), found
    return first


def session(deployment: Deployment, cli: Cli, backend: str) -> dict[str, Any]:
    root = bundles()
    assert root is not None
    key = f"{cli.harness.replace('_', '-')}-on-{BACKENDS.index(backend)}"
    deployment.engine.policy.scripts[key] = MULTI.script(cli, key)
    task = deployment.task(
        key, cli.harness, MULTI.instruction.replace("KEY", key), watched=False, artifacts=list(MULTI.files)
    )
    agent = task.agent
    if backend == "local-plain":
        command = root / cli.harness / "bin" / versions().harnesses[cli.harness].command
        agent = msgspec.structs.replace(agent, settings={"command": str(command)})
    runtime = spec(backend, task.runtime.volumes)
    result, _ = deployment.run(msgspec.structs.replace(task, runtime=runtime, agent=agent), watched=False)
    captured = deployment.captured(result)
    said = deployment.artifact(result, "agent.log")[-1500:].decode("utf-8", "replace")
    assert result.error is None, (backend, result.error, said)
    return {
        "termination": result.termination,
        "files": {name: deployment.artifact(result, name).decode() for name in MULTI.files},
        "turns": len(captured),
        "traces": len(result.trajectory.traces),
        "sampled": [len(c.sampled_ids) for c in captured],
    }


@pytest.mark.parametrize("cli", [PI, MINI], ids=lambda cli: cli.harness)
def test_a_cli_does_the_same_on_every_back_end(deployment, cli):
    if why := missing(cli.harness):
        pytest.skip(why)
    first = on_each(lambda backend: session(deployment, cli, backend))
    assert first["termination"] == "finished" and first["files"] == MULTI.files and first["turns"] >= MULTI.min_turns


def batch(deployment: Deployment, backend: str) -> dict[str, Any]:
    """The quickstart's batch as `polar demo` runs it, two samples of each task: what a trainer gets."""
    where = spec(backend, [])
    tasks = quickstart(2, where.backend or "")
    for task in tasks:
        task.runtime.options = where.options
    submit(tasks, deployment.store, deployment.objects, deployment.settings)
    results = pull(deployment.settings, tasks[0].results_queue, 2 * len(tasks))
    return {
        f"{r.task_id.rpartition('-')[0]}/{r.sample_index}": {
            "termination": r.termination,
            "verdict": r.verdict,
            "reward": r.reward,
            "error": r.error and r.error.message,
            "usage": (r.usage.turns, r.usage.prompt_tokens, r.usage.sampled_tokens),
            "traces": [(len(t.prompt_ids), len(t.response_ids), sum(t.loss_mask)) for t in r.trajectory.traces],
        }
        for r in results
    }


def test_the_quickstart_has_the_same_results_on_every_back_end(deployment):
    first = on_each(lambda backend: batch(deployment, backend))
    failed = {"opposite-of-hot", "colour-of-grass"}
    assert {name.partition("/")[0] for name in first} == set(QUESTIONS) and len(first) == 2 * len(QUESTIONS)
    for name, one in first.items():
        question = name.partition("/")[0]
        wanted = ("failed", 0.0) if question in failed else ("passed", 1.0)
        assert (one["termination"], one["verdict"], one["reward"]) == ("finished", *wanted), (name, one)
        turns = 3 if question == "colour-of-grass" else len(Answers.turns.get(question, "x"))
        assert one["usage"][0] == turns and one["usage"][2] == sum(t[2] for t in one["traces"]) > 0, (name, one)
