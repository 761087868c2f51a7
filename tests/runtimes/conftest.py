"""The back-ends under test, each with a proxy to reach, and everything they make removed again."""

from __future__ import annotations

import os
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from polar.config import Settings
from polar.sandbox import ProxyEndpoint, Runtime, Sandbox
from polar.task import RuntimeSpec
from runtimes import apptainer_cli, bwrap
from runtimes.apptainer import ApptainerRuntime
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime

IMAGE = "polar-sandbox:base"
REPOSITORY = Path(__file__).parents[2]
BACKENDS = ["local-plain", "local-bwrap", "apptainer", pytest.param("docker", marks=pytest.mark.docker)]


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = f"proxy saw {self.path}".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "sandbox"

    def log_message(self, *_: Any) -> None:
        pass


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


class _Tcp(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


class FakeProxy:
    """The same answers on a Unix socket and on a port of the host's loopback."""

    def __init__(self, folder: Path):
        self.socket = str(folder / "p.sock")
        self.tcp = _Tcp(("127.0.0.1", 0), _Handler)
        self.port = self.tcp.server_address[1]
        threading.Thread(target=self.tcp.serve_forever, args=(0.05,), daemon=True).start()
        self.start_unix()

    def start_unix(self) -> None:
        self.unix = _Unix(self.socket, _Handler)
        threading.Thread(target=self.unix.serve_forever, args=(0.05,), daemon=True).start()

    def stop_unix(self) -> None:
        self.unix.shutdown()
        self.unix.server_close()
        os.unlink(self.socket)

    @property
    def endpoint(self) -> ProxyEndpoint:
        return ProxyEndpoint(url=f"http://127.0.0.1:{self.port}", socket=self.socket)


@dataclass
class Backend:
    id: str
    runtime: Runtime
    settings: Settings
    base: dict[str, Any]
    made: list[Sandbox] = field(default_factory=list)
    gone: list[Sandbox] = field(default_factory=list)  # made and removed again

    @property
    def boxed(self) -> bool:
        return self.id != "local-plain"

    def spec(self, **fields: Any) -> RuntimeSpec:
        options = {**self.base.get("options", {}), **fields.pop("options", {})}
        return RuntimeSpec(**{**self.base, **fields, "options": options})

    def create(
        self, proxy: ProxyEndpoint | None = None, labels: dict[str, str] | None = None, **fields: Any
    ) -> Sandbox:
        box = self.runtime.create(
            self.spec(**fields), labels={"polar.test": "1", **(labels or {})}, proxy=proxy, timeout=60
        )
        self.made.append(box)
        return box

    def clear(self) -> None:
        for box in self.made:
            box.destroy()
        self.gone += self.made
        self.made.clear()


def docker_missing() -> str:
    ok, why = DockerRuntime(Settings()).available()
    return "" if ok else f"no Docker engine: {why}"


def ensure_image() -> None:
    subprocess.run(
        [sys.executable, "compose/base_image.py", "--if-missing", "--tag", IMAGE], cwd=REPOSITORY, check=True
    )


def apptainer_folder() -> Path:
    """A data folder that the containers' owner can get into: pytest's own ones are private."""
    if isinstance(found := apptainer_cli.find(), str):
        pytest.skip(f"no rootless Apptainer: {found}")
    folder = Path(tempfile.mkdtemp(prefix="polar-apptainer-", dir="/var/tmp"))
    folder.chmod(0o755)
    return folder


def apptainer_base() -> Path:
    """The base image, unpacked once per machine: $POLAR_APPTAINER_BASE, or made of the Docker engine's."""
    base = Path(os.environ.get("POLAR_APPTAINER_BASE") or "/var/tmp/polar-apptainer-base")
    if not base.is_dir():
        if why := docker_missing():
            pytest.skip(f"no image for Apptainer ($POLAR_APPTAINER_BASE), and {why}")
        ensure_image()
        with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
            new = Path(folder, "rootfs")
            subprocess.run([str(REPOSITORY / "compose/apptainer/from_docker.sh"), IMAGE, str(new)], check=True)
            try:
                new.rename(base)
            except OSError:  # another run was faster
                pass
    return base


def apptainer_image(settings: Settings) -> str:
    """Its name on the shelf of this deployment."""
    (shelf := Path(settings.data_dir, "apptainer", "shelf")).mkdir(parents=True)
    (shelf / "base").symlink_to(apptainer_base())
    return "base"


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Backend]:
    settings = Settings(data_dir=str(tmp_path_factory.mktemp("data")))
    if request.param == "docker":
        if why := docker_missing():
            pytest.skip(why)
        ensure_image()
        made = Backend(request.param, DockerRuntime(settings), settings, {"image": IMAGE})
    elif request.param == "apptainer":
        settings = Settings(data_dir=str(apptainer_folder()))
        request.addfinalizer(lambda: shutil.rmtree(settings.data_dir))
        image = apptainer_image(settings)
        made = Backend(request.param, ApptainerRuntime(settings), settings, {"image": image})
    else:
        isolation = {"local-plain": "none", "local-bwrap": "bwrap"}[request.param]
        if isolation == "bwrap" and isinstance(found := bwrap.find(), str):
            pytest.skip(f"no working bubblewrap: {found}")
        made = Backend(request.param, LocalRuntime(settings), settings, {"options": {"isolation": isolation}})
    yield made
    made.clear()


@pytest.fixture
def make(backend: Backend) -> Iterator[Callable[..., Sandbox]]:
    """Fresh sandboxes of this test's own."""
    before = len(backend.made)
    yield backend.create
    for box in backend.made[before:]:
        box.destroy()
    backend.gone += backend.made[before:]
    del backend.made[before:]


@pytest.fixture(scope="module")
def box(backend: Backend) -> Sandbox:
    """One sandbox for the tests that leave nothing in it which others would mind."""
    return backend.create()


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[FakeProxy]:
    tmp_path.chmod(0o755)
    fake = FakeProxy(tmp_path)
    yield fake
    fake.stop_unix()
    fake.tcp.shutdown()
    fake.tcp.server_close()


def unique() -> str:
    """A duration for `sleep` that no other process on this machine has: it can be found by it."""
    return f"{30_000 + uuid.uuid4().int % 10**4}.{uuid.uuid4().int % 10**9:09d}"


def sleeping(word: str) -> set[int]:
    """The `sleep` processes of this machine that have `word` as an argument."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            argv = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            state = Path("/proc", pid, "stat").read_text().rpartition(") ")[2][0]
        except OSError:
            continue
        if b"sleep" in argv[0] and word.encode() in argv and state not in "ZX":
            found.add(int(pid))
    return found


def running(word: str) -> int:
    return len(sleeping(word))


def until(condition: Callable[[], Any], seconds: float = 10.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the condition never came true"
        time.sleep(0.02)
    return value


@pytest.fixture
def public() -> Iterator[Path]:
    """A folder that every user of this machine can get into."""
    with tempfile.TemporaryDirectory(prefix="polar-public-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture
def host_listener() -> Iterator[int]:
    """A port of the host's loopback that accepts."""
    with socket.create_server(("127.0.0.1", 0)) as s:
        yield s.getsockname()[1]
