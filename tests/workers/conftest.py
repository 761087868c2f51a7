from __future__ import annotations

import pytest

from polar.config import Settings
from workers.context import Context


@pytest.fixture
def ctx(tmp_path, redis_url, store):
    """One node whose stages the test calls itself."""
    c = Context(Settings(namespace="t", data_dir=str(tmp_path), broker=redis_url, lease_seconds=60.0), "a")
    c.store.node_beat("a", ready=8, slots=8, backends=["local"])
    yield c
    c.leases.close()
