"""The image cache of `apptainer`: nothing stays of a build that was killed or ran out of time, and it keeps to its limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.config import Settings
from polar.errors import InfraError
from polar.task import RuntimeSpec
from runtimes import apptainer_images, procs
from runtimes.apptainer import ApptainerRuntime
from runtimes.apptainer_images import LIMIT_VARIABLE
from tests.runtimes import small_image
from tests.runtimes.conftest import REPOSITORY, apptainer_base, apptainer_folder, until

WORKER = """
import sys
from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes.apptainer import ApptainerRuntime
runtime = ApptainerRuntime(Settings(data_dir=sys.argv[1]))
runtime.create(RuntimeSpec(image=sys.argv[2]), labels={}, proxy=None, timeout=300)
"""


class Stalling(small_image._Handler):
    """Begins to send the layer, and no more until `go` is set."""

    go = threading.Event()

    def _answer(self, status, body, kind, headers=None):
        if kind != "application/octet-stream" or len(body) < 1 << 20:
            return super()._answer(status, body, kind, headers)
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: 1 << 19])
        self.server.seen.append("half")
        self.go.wait(120)
        self.wfile.write(body[1 << 19 :])


@pytest.fixture(scope="module")
def small() -> small_image.Image:
    return small_image.build(apptainer_base())


@pytest.fixture
def registry(small, monkeypatch) -> Iterator[small_image.Registry]:
    monkeypatch.setenv("APPTAINER_NOHTTPS", "true")
    with small_image.Registry(small) as made:
        monkeypatch.setenv("APPTAINER_DOCKER_USERNAME", made.account[0])
        monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", made.account[1])
        yield made
        Stalling.go.set()
        made.shutdown()
    Stalling.go.clear()


@pytest.fixture
def settings() -> Iterator[Settings]:
    folder = apptainer_folder()
    yield Settings(data_dir=str(folder), volume_roots=[str(folder)])
    shutil.rmtree(folder)


def image_of(registry: small_image.Registry) -> str:
    return f"docker://{registry.host}/private/small:1"


def use(settings: Settings, image: str, timeout: float = 120) -> None:
    """As another worker process would."""
    runtime = ApptainerRuntime(settings)
    box = runtime.create(RuntimeSpec(image=image), labels={}, proxy=None, timeout=timeout)
    assert box.exec("echo $GREETING", timeout=30).output == b"hello there\n"
    box.destroy()


def images(settings: Settings) -> Path:
    return Path(settings.data_dir, "apptainer", "cache", "images")


def builders(settings: Settings) -> set[int]:
    folder = str(images(settings)).encode()
    return {p for p in procs.scan() if procs.argv_contains(p, folder) or procs.environ_contains(p, folder)}


def layers(settings: Settings) -> list[Path]:
    return list(images(settings).glob(".layers-*"))


def only_images(settings: Settings) -> int:
    """How many lie in the cache, in which nothing else may be that has a size."""
    assert sorted(p.name for p in images(settings).parent.iterdir()) == ["config", "images", "locks", "refs"]
    found = list(images(settings).iterdir())
    assert all(sorted(p.name for p in image.iterdir()) == ["image.json", "rootfs"] for image in found), found
    return len(found)


def test_what_was_pulled_is_not_kept_beside_the_image(settings, registry):
    use(settings, image_of(registry))
    assert only_images(settings) == 1 and builders(settings) == set()


@pytest.mark.parametrize("next_use", ["same", "other"])
def test_a_worker_killed_while_it_pulls_leaves_nothing(settings, registry, small, next_use, monkeypatch):
    registry.RequestHandlerClass = Stalling
    other = Path(settings.data_dir, "other.tar")
    small_image.save(small, other)
    with subprocess.Popen(
        [sys.executable, "-c", WORKER, settings.data_dir, image_of(registry)], cwd=REPOSITORY
    ) as worker:
        until(lambda: "half" in registry.seen, 60)
        # While it lives, nobody takes its folder.
        ApptainerRuntime(settings).images.shrink()
        assert len(list(images(settings).glob(".new-*"))) == 1
        os.kill(worker.pid, signal.SIGKILL)
    assert builders(settings), "the build ended with its worker: then this test shows nothing"
    if next_use == "same":
        registry.RequestHandlerClass = small_image._Handler
        use(settings, image_of(registry))
    else:
        use(settings, f"docker-archive:{other}")
        # Nothing was fetched by its registry's name.
        (images(settings).parent / "refs").mkdir()
        assert len(layers(settings)) == 1, "for the next try"
        monkeypatch.setattr(apptainer_images, "LAYERS_SECONDS", -1.0)  # the day is over
        ApptainerRuntime(settings).images.shrink()
    assert only_images(settings) == 1 and builders(settings) == set()


def test_a_build_that_runs_out_of_time_leaves_its_layers_to_the_next(settings, registry):
    registry.RequestHandlerClass = Stalling
    with pytest.raises(InfraError) as e:
        use(settings, image_of(registry), timeout=4)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    assert list(images(settings).iterdir()) == layers(settings) != [] and builders(settings) == set()
    registry.RequestHandlerClass = small_image._Handler
    use(settings, image_of(registry))
    assert only_images(settings) == 1


def test_an_eviction_that_was_killed_is_ended_by_the_next(settings, small, monkeypatch):
    """The same content was evicted before, by a worker that died before it had removed it."""
    archives = [Path(settings.data_dir, f"{name}.tar") for name in "ab"]
    for path in archives:
        small_image.save(small, path, f"{path.stem}:latest")
    use(settings, f"docker-archive:{archives[0]}")
    (first,) = images(settings).iterdir()
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    for rest in (f".old-{first.name}", ".old-another"):
        shutil.copytree(first / "rootfs" / "usr" / "lib", images(settings) / rest, symlinks=True)
    use(settings, f"docker-archive:{archives[1]}")
    assert len(left := list(images(settings).iterdir())) == 1 and left != [first]


def test_what_can_t_be_removed_stops_nobody(settings, small, monkeypatch):
    from runtimes import tree

    whole = tree.remove

    def remove(path: Path) -> None:
        if path.name.startswith(".old-"):
            raise OSError("the disk is busy")
        whole(path)

    archives = [Path(settings.data_dir, f"{name}.tar") for name in "ab"]
    for path in archives:
        small_image.save(small, path, f"{path.stem}:latest")
    monkeypatch.setattr(tree, "remove", remove)
    monkeypatch.setenv(LIMIT_VARIABLE, "0.000001")
    for path in (*archives, archives[0]):
        use(settings, f"docker-archive:{path}")
    assert len(list(images(settings).glob(".old-*"))) == 2
    monkeypatch.undo()
    ApptainerRuntime(settings).images.shrink()
    assert len(list(images(settings).iterdir())) == 1
