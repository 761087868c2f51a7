"""kill -9 of the worker at every kind of step and at random moments, then the janitor: nothing is left, each time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from polar.codec import to_json
from polar.task import RuntimeSpec
from runtimes import apptainer_layer
from tests.runtimes.conftest import REPOSITORY

MOMENTS = 25
SEED_VARIABLE = "POLAR_TEST_SEED"  # repeats a run


def deaths_of(backend, proxy, spec: RuntimeSpec, deaths: int, seed: str) -> dict[str, Any]:
    argv = [sys.executable, "-m", "tests.runtimes.killed_worker", backend.runtime.name, backend.settings.data_dir]
    argv += [to_json(spec).decode(), to_json(proxy.endpoint).decode(), str(deaths), seed]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    assert backend.runtime.list({"polar.attempt": "whole"}) == []
    return json.loads(done.stdout.splitlines()[-1])


def specs(backend) -> list[RuntimeSpec]:
    """One for each way in which the back-end keeps files."""
    kinds = []
    if backend.id == "apptainer":
        kinds = ["memory"] + ([] if apptainer_layer.no_files() else ["file"])
    return [backend.spec(), *(backend.spec(disk_mb=50, options={"disk": kind}) for kind in kinds)]


@pytest.mark.parametrize("deaths", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(1300)
def test_nothing_is_left(backend, proxy, deaths):
    for spec in specs(backend):
        told = deaths_of(backend, proxy, spec, deaths, "")
        assert told["killed"] >= deaths - 2 and told["found"] > 0, spec.options
        assert told["left"] == [], spec.options


@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_nothing_is_left_after_deaths_at_random_moments(backend, proxy):
    for spec in specs(backend):
        seed = os.environ.get(SEED_VARIABLE) or str(random.SystemRandom().randrange(10**9))
        print(f"{backend.id} {spec.options}: {SEED_VARIABLE}={seed}")
        told = deaths_of(backend, proxy, spec, MOMENTS, seed)
        assert told["killed"] > 0 and told["found"] > 0, seed
        assert told["left"] == [], seed
