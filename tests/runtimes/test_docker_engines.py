"""The conformance suite again, on the other engines that the `docker` runtime takes.

What one of them can't keep is skipped by the test's name, with the reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from polar.config import Settings
from polar.errors import UnsupportedSpec
from runtimes.docker import DockerRuntime
from tests.runtimes import engines
from tests.runtimes.conftest import IMAGE, Backend, docker_missing
from tests.runtimes.test_changes import *  # noqa: F403
from tests.runtimes.test_conformance import *  # noqa: F403
from tests.runtimes.test_hostile import *  # noqa: F403

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ENGINES: dict[str, Callable[[], AbstractContextManager[dict[str, str]]]] = {
    "podman": lambda: engines.podman(rootless=False),
    "podman-rootless": lambda: engines.podman(rootless=True),
    "docker-rootless": engines.rootless_docker,
}
NO_TUN = "slirp4netns, which makes a rootless network, needs a /dev/net/tun that users may open"
NOT_KEPT = "the rootless engine doesn't keep it, so it is refused when the sandbox is created (test_limits_are_kept_or_refused)"
LIMITED = {
    "test_fork_bomb": "pids",
    "test_forks_are_refused_in_the_end": "pids",
    "test_memory_hog": "memory_mb",
    "test_cpu_hog": "cpus",
    "test_open_files": "open_files",
}
KNOWN: dict[tuple[str, str], str] = {}


def tun_is_open() -> bool:
    try:
        return os.stat("/dev/net/tun").st_mode & 0o006 == 0o006
    except OSError:
        return False


if not tun_is_open():
    KNOWN["podman-rootless", "test_internet_still_reaches_the_proxy"] = NO_TUN


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    if why := docker_missing():
        pytest.skip(f"the image comes from this machine's engine: {why}")
    with ENGINES[request.param]() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield request.param


@pytest.fixture(scope="module")
def backend(engine: str) -> Iterator[Backend]:
    with engines.short_folder() as data:  # that the engine's user can get into
        settings = Settings(data_dir=str(data))
        made = Backend("docker", DockerRuntime(settings), settings, {"image": IMAGE})
        yield made
        made.clear()


@pytest.fixture(autouse=True)
def known(engine: str, backend: Backend, request: pytest.FixtureRequest) -> None:
    name = getattr(request.node, "originalname", request.node.name)
    if why := KNOWN.get((engine, name)):
        pytest.skip(why)
    if (limit := LIMITED.get(name)) and limit in backend.runtime.available()[1]:
        pytest.skip(f"{limit}: {NOT_KEPT}")


def test_limits_are_kept_or_refused(engine, backend, make):
    """A rootless engine without control groups takes them and does nothing."""
    ok, text = backend.runtime.available()
    assert ok and text.startswith("Podman" if "podman" in engine else "Docker")
    asked = {"memory_mb": 64, "pids": 20, "cpus": 0.5, "open_files": 50}
    refused = {name: value for name, value in asked.items() if name in text}
    assert not refused or "rootless" in engine
    for name, value in refused.items():
        with pytest.raises(UnsupportedSpec, match=rf"runtime\.{name}"):
            make(**{name: value})
    if not refused:
        assert make(**asked).exec(["python3", "-c", "b'x' * (200 << 20)"], timeout=30).exit_code == 137
