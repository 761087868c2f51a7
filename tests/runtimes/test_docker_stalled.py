"""An engine, or a registry, that falls silent in the middle: what waits for it ends, and what doesn't need it goes on."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import docker
import pytest

from polar.config import Settings
from polar.errors import InfraError
from polar.task import RuntimeSpec
from runtimes import docker_changes, docker_client, docker_sandbox
from runtimes.docker import DockerRuntime
from tests.runtimes import small_image
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image, unique
from tests.runtimes.engines import Tunnel

pytestmark = pytest.mark.docker

SHORT = 3.0  # seconds instead of minutes; every single answer of the engine must come within it too
OURS = {"polar.test": f"stalled-{unique()}"}


class _Handler(Tunnel):
    server: Engine
    passing: int | None = None  # bytes that the engine may still say

    def handle(self) -> None:
        try:
            super().handle()
        finally:
            if self.passing is not None:
                self.server.left.set()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if source is self.request:
                    if self.server.word in data:
                        self.passing = self.server.passing
                        self.server.asked.set()
                elif self.passing is not None:
                    said, self.passing = data[: self.passing], max(0, self.passing - len(data))
                    target.sendall(said)
                    if not self.passing:
                        self._stall(data[len(said) :], source, target)
                    continue
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _stall(self, rest: bytes, source: socket.socket, target: socket.socket) -> None:
        self.server.stalled.set()
        while self.server.trickle and not self.server.over.wait(0.05):
            target.sendall(rest)
            rest = source.recv(1 << 12)
        self.server.over.wait()
        target.shutdown(socket.SHUT_RDWR)


class Engine(socketserver.ThreadingUnixStreamServer):
    """The machine's own one, behind a socket at which it says only `passing` bytes to a request with `word`, and with
    `trickle` the rest slowly."""

    daemon_threads = True

    def __init__(self, path: Path):
        self.word, self.passing, self.trickle = b"\0", 0, False
        self.asked, self.stalled = threading.Event(), threading.Event()
        self.over, self.left = threading.Event(), threading.Event()
        super().__init__(str(path), _Handler)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    direct = DockerRuntime(Settings(data_dir=str(tmp_path)))
    with Engine(tmp_path / "s") as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/s")
        monkeypatch.setenv("POLAR_DOCKER_PARALLEL", "1")
        yield server
        server.over.set()
        server.shutdown()
    monkeypatch.delenv("DOCKER_HOST")
    for ref in direct.list(OURS):
        direct.attach(ref).destroy()


@pytest.fixture
def runtime(engine: Engine, tmp_path: Path) -> DockerRuntime:
    return DockerRuntime(Settings(data_dir=str(tmp_path)))


def create(runtime: DockerRuntime, timeout: float = 60, **fields: Any) -> Any:
    return runtime.create(RuntimeSpec(**{"image": IMAGE, **fields}), labels=OURS, proxy=None, timeout=timeout)


def failing(call: Callable[[], Any], release: Callable[[], Any]) -> InfraError:
    """How `call` fails though nothing has been released."""
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(call)
        try:
            with pytest.raises(InfraError) as e:
                running.result(100)
        finally:
            release()
    return e.value


def download(box: Any, folder: Path) -> None:
    box.download("big", folder / "down", limit=1 << 30)


def changes(box: Any, folder: Path) -> None:
    box.changes(folder / "changes", under=box.ref.workdir, baseline=b"", limit=1 << 30)


LIMITS = {download: (docker_sandbox, "TRANSFER_TIMEOUT"), changes: (docker_changes, "WRITE_TIMEOUT")}


@pytest.mark.parametrize("how", ["no progress", "no time left", "too slow"])
@pytest.mark.parametrize("transfer", LIMITS)
def test_a_transfer_that_stalls_ends(engine, runtime, monkeypatch, tmp_path, transfer, how):
    box = create(runtime)
    assert box.exec("head -c 4000000 /dev/urandom > big", timeout=60).exit_code == 0
    engine.word, engine.passing, engine.trickle = b"big", 100_000, how == "too slow"
    monkeypatch.setattr(*((docker_client, "STALL") if how == "no progress" else LIMITS[transfer]), SHORT)
    e = failing(lambda: transfer(box, tmp_path), engine.over.set)
    assert (e.code, e.retryable) == ("artifact_failed", True)
    assert ("nothing more came for 3 s" if how == "no progress" else "the transfer takes too long") in e.message
    assert engine.stalled.is_set() and engine.left.wait(60)  # and its connection was closed


def test_commands_run_beside_a_transfer_that_stalls(engine, runtime, tmp_path):
    box, other = create(runtime), create(runtime)
    assert box.exec("head -c 4000000 /dev/urandom > big", timeout=60).exit_code == 0
    engine.word, engine.passing = b"big", 100_000
    with ThreadPoolExecutor(1) as pool:
        transfer = pool.submit(download, box, tmp_path)
        try:
            assert engine.stalled.wait(60)
            assert other.exec("echo on", timeout=30).output == b"on\n" and not transfer.done()
        finally:
            engine.over.set()
        assert isinstance(transfer.exception(60), InfraError)


def test_a_pull_that_stalls_ends(engine, runtime, monkeypatch, tmp_path):
    base = tmp_path / "base"
    for f in ("bin", "lib", "lib64"):
        (base / f).mkdir(parents=True)
    for f in (*small_image.PROGRAMS, "lib64/ld-linux-x86-64.so.2"):
        (base / f).write_text("it is never run")
    with small_image.Registry(small_image.build(base)) as registry:
        monkeypatch.setenv("POLAR_REGISTRY", registry.host)
        monkeypatch.setenv("POLAR_REGISTRY_USERNAME", registry.account[0])
        monkeypatch.setenv("POLAR_REGISTRY_PASSWORD", registry.account[1])
        monkeypatch.setattr(docker_client, "STALL", SHORT)
        engine.word, engine.passing = b"/images/create", 400
        image = f"{registry.host}/private/small:1"
        try:
            e = failing(lambda: create(runtime, image=image, options={"pull": "missing"}), engine.over.set)
        finally:
            with contextlib.suppress(docker.errors.ImageNotFound):
                docker.APIClient(version="1.41").remove_image(image, force=True)
            registry.shutdown()
        assert (e.code, e.retryable, e.message) == (
            "runtime_create_failed",
            True,
            "Docker engine: nothing more came for 3 s",
        )
        assert engine.stalled.is_set() and engine.left.wait(60)


def test_a_silent_registry_holds_up_nobody_for_good(engine, runtime):
    registry = socket.create_server(("127.0.0.1", 0))
    fields = {"image": f"127.0.0.1:{registry.getsockname()[1]}/no/such:1", "options": {"pull": "missing"}}
    engine.word, engine.passing = b"/images/create", 1 << 30  # only to be seen
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(create, runtime, timeout=600, **fields)
        try:
            assert engine.asked.wait(60)
            second = failing(lambda: create(runtime, timeout=1, **fields), lambda: None)
            assert (second.code, second.retryable) == ("runtime_create_failed", True)
            assert "it is still being pulled" in second.message and not first.done()
        finally:
            registry.close()
        assert isinstance(first.exception(100), InfraError)


def test_a_silent_registry_is_waited_for_until_the_deadline(engine, runtime):
    with socket.create_server(("127.0.0.1", 0)) as registry:
        fields = {"image": f"127.0.0.1:{registry.getsockname()[1]}/no/such:1", "options": {"pull": "missing"}}
        e = failing(lambda: create(runtime, timeout=SHORT, **fields), registry.close)
    assert (e.code, e.retryable) == ("runtime_create_failed", True) and "timed out" in e.message
