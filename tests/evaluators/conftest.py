"""Sandboxes of the real runtimes, made as the pipeline makes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from polar.config import Settings
from polar.sandbox import Runtime, Sandbox
from polar.task import RuntimeSpec
from runtimes import bwrap
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime

IMAGE = "polar-sandbox:base"
REPO = "/repo"


def runtime_of(name: str, data: Path) -> tuple[Runtime, dict]:
    """The runtime called `name` and what its specs need; skips, saying why, where this machine can't have it."""
    settings = Settings(data_dir=str(data))
    if name == "docker":
        ok, why = DockerRuntime(settings).available()
        if not ok:
            pytest.skip(f"no Docker engine: {why}")
        script = Path(__file__).parents[2] / "compose" / "base_image.py"
        subprocess.run([sys.executable, script, "--if-missing", "--tag", IMAGE], check=True)
        return DockerRuntime(settings), {"image": IMAGE, "workdir": REPO}
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    return LocalRuntime(settings), {"options": {"isolation": "bwrap"}, "workdir": REPO}


@pytest.fixture(scope="module", params=["local", pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])])
def place(request, tmp_path_factory) -> tuple[Runtime, dict]:
    return runtime_of(request.param, tmp_path_factory.mktemp("data"))


@pytest.fixture
def make(place) -> Iterator[Callable[..., Sandbox]]:
    runtime, base = place
    made: list[Sandbox] = []

    def make(**fields) -> Sandbox:
        spec = RuntimeSpec(backend=runtime.name, **{**base, **fields})
        made.append(runtime.create(spec, labels={"t": "t"}, proxy=None, timeout=60))
        return made[-1]

    yield make
    for box in made:
        box.destroy()
