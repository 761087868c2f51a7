"""A process of some hundred sessions has more than 1,024 descriptors open."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import holder, procs
from runtimes.docker import DockerRuntime
from tests.runtimes.conftest import IMAGE, REPOSITORY, docker_missing, ensure_image, unique

MANY = 1100


@pytest.fixture
def many() -> Iterator[None]:
    """All numbers up to MANY are taken."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 2 * MANY:
        pytest.skip(f"this process may not open {2 * MANY} files: its hard limit is {hard}")
    if soft < 2 * MANY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (2 * MANY, hard))
    taken = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while taken[-1] < MANY:
            taken.append(os.dup(taken[0]))
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.docker
def test_a_docker_command(many, tmp_path):
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
    box = runtime.create(RuntimeSpec(image=IMAGE), labels={"polar.test": unique()}, proxy=None, timeout=60)
    try:
        data = os.urandom(1 << 20)  # both directions wait for each other
        done = box.exec("cat; exit 4", stdin=data, timeout=60, output_limit=len(data))
        assert (done.exit_code, done.output) == (4, data)
    finally:
        box.destroy()


def test_the_end_of_a_holder(many):
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            found = procs.read(process.pid)
            assert found
            holder.end(found)
            assert process.wait(0) == -9  # it was waited for
        finally:
            process.kill()


def test_a_worker_raises_its_limit(tmp_path: Path):
    """As far as it may; without a broker it ends right after."""
    program = (
        "import resource,sys;from workers.__main__ import main;"
        "resource.setrlimit(resource.RLIMIT_NOFILE,(500,2000));"
        "print(main(['run']),resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "2 (2000, 2000)\n" and "broker: not set" in done.stderr
