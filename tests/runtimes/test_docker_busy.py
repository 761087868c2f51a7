"""All of a worker's calls to the Docker engine are taken: a command that runs already doesn't suffer from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import docker_engine, docker_exec
from runtimes.docker import DockerRuntime
from runtimes.docker_sandbox import DockerSandbox
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image, unique, until

pytestmark = pytest.mark.docker


class Engine(docker_engine.Engine):
    """One call at once; `refused` counts who came in vain."""

    refused = 0

    @contextlib.contextmanager
    def call(self, **how: Any) -> Iterator[Any]:
        try:
            with super().call(**how) as api:
                yield api
        except docker_engine.Busy:
            self.refused += 1
            raise


@pytest.fixture
def engine() -> Engine:
    return Engine(1)


@pytest.fixture
def box(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DockerSandbox]:
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    monkeypatch.setattr(docker_exec, "QUIET", 0.1)
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
    runtime._engine = engine
    made = runtime.create(RuntimeSpec(image=IMAGE), labels={"polar.test": unique()}, proxy=None, timeout=60)
    yield made
    made.destroy()


def begun(log: Path) -> bool:
    return log.exists() and b"begun" in log.read_bytes()


def test_a_quiet_command_goes_on_and_its_end_is_learnt(engine, box, tmp_path):
    log, script = tmp_path / "log", "echo begun; while ! test -e /tmp/go; do sleep 0.05; done; exit 5"
    with ThreadPoolExecutor(1) as pool:
        command = pool.submit(box.exec, script, timeout=200, log=log)
        until(lambda: begun(log), 60)
        with engine.call():
            until(lambda: engine.refused >= 2, 60)
            assert not command.done()
            docker.from_env().containers.get(box.ref.handle).exec_run(["touch", "/tmp/go"])
            seen = engine.refused
            until(lambda: engine.refused >= seen + 2, 60)  # who asks for the exit code is refused too
        assert command.result(60).exit_code == 5


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_quiet_command_ends_on_time(engine, box, tmp_path, how):
    log = tmp_path / "log"
    wanted: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        limits = {"timeout": 200, "cancelled": lambda: bool(wanted)} if how == "cancel" else {"timeout": 8}
        command = pool.submit(box.exec, "echo begun; sleep 300", log=log, **limits)
        until(lambda: begun(log), 60)
        with engine.call():
            until(lambda: engine.refused, 60)
            wanted.append(1)
            r = command.result(100)
        assert (r.timed_out, r.cancelled) == (how == "deadline", how == "cancel")
