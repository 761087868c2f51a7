"""Who may ask, and what a service without Redis answers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from api.__main__ import is_loopback
from api.app import make_app
from api.control import Control
from polar.config import Settings
from tests.api.conftest import TOKEN


@pytest.mark.parametrize("header", ["", "Bearer wrong", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \udcff"])
async def test_without_the_token_nothing_is_answered(make_api, header):
    api = await make_api(TOKEN)
    headers = {"Authorization": header}
    for path in ("/v1/status", "/v1/tasks", "/metrics", "/rollout/status", "/v1/events", "/nothing"):
        reply = await api.get(path, headers=headers)
        assert reply.status == 401 and (await reply.json())["error"]["code"] == "unauthorized", path
    assert (await api.put("/v1/uploads", data=b"x", headers=headers)).status == 401
    assert (await api.get("/health", headers=headers)).status == 200
    assert (await api.get("/", headers=headers)).status == 200
    assert (await api.get("/v1/status")).status == 200, "the client's own header is right"


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Origin": "null"}])
async def test_open_on_loopback_means_this_machine(api, headers):
    reply = await api.get("/v1/status", headers=headers)
    assert reply.status == 403 and (await reply.json())["error"]["code"] == "forbidden"
    assert (await api.get("/v1/status", headers={"Origin": "http://localhost:1234"})).status == 200


async def test_without_redis_the_answer_is_503(aiohttp_client, tmp_path):
    control = Control(Settings(broker=f"unix://{tmp_path}/none?db=0", data_dir=str(tmp_path)))
    api = await aiohttp_client(make_app(control, ""))
    reply = await api.get("/v1/tasks")
    assert reply.status == 503 and (await reply.json())["error"]["code"] == "store_unavailable"
    reply = await api.get("/health")
    assert reply.status == 503 and await reply.json() == {"status": "unavailable", "redis": False, "objects": True}


def test_loopback():
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


def _env(settings: Settings, **extra: str) -> dict[str, str]:
    keep = {k: v for k, v in os.environ.items() if not k.startswith("POLAR_")}
    polar = {"POLAR_BROKER": settings.broker, "POLAR_NAMESPACE": "t", "POLAR_DATA_DIR": settings.data_dir}
    return keep | polar | extra


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_public_address_without_a_token_is_refused(settings, host):
    out = subprocess.run(
        [sys.executable, "-m", "api", "--host", host], env=_env(settings), capture_output=True, text=True, timeout=60
    )
    assert out.returncode == 2 and "is not loopback and POLAR_API_TOKEN is not set" in out.stderr


def test_the_process_from_start_to_end(settings, tmp_path):
    file = tmp_path / "api.url"
    child = start(settings, file, POLAR_API_TOKEN=TOKEN)
    try:
        url = wait_for(file, child)
        request = urllib.request.Request(f"{url}/v1/status", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as reply:
            assert reply.status == 200
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/status", timeout=10)
        request = urllib.request.Request(f"{url}/v1/events", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as stream:
            assert stream.readline() == b": connected\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(10) == 0, "an open event stream doesn't hold it up"
    finally:
        child.kill()
        child.wait()


def start(settings: Settings, file: Path, **extra: str) -> subprocess.Popen:
    argv = [sys.executable, "-m", "api", "--port", "0", "--port-file", str(file)]
    return subprocess.Popen(argv, env=_env(settings, **extra))


def wait_for(file: Path, child: subprocess.Popen, seconds: float = 30) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end and child.poll() is None:
        if file.exists():
            return file.read_text()
        time.sleep(0.02)
    raise AssertionError(f"the control plane did not start: {child.poll()}")
