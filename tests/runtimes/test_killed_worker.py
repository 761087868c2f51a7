"""kill -9 of the worker at every kind of step, then the janitor: nothing is left."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from polar.codec import to_json
from tests.runtimes.conftest import REPOSITORY


@pytest.mark.parametrize("deaths", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_nothing_is_left(backend, proxy, deaths):
    argv = [sys.executable, "-m", "tests.runtimes.killed_worker", backend.runtime.name, backend.settings.data_dir]
    argv += [to_json(backend.spec()).decode(), to_json(proxy.endpoint).decode(), str(deaths)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["killed"] >= deaths - 2 and told["found"] > 0
    for kind in ("left", "folders", "processes", "groups"):
        assert told[kind] == [], kind
    assert not told["mounts"]
    assert backend.runtime.list({"polar.attempt": "whole"}) == []
