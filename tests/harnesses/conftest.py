from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.deployment import Deployment, bundles
from tests.harnesses.scripted_engine import ScriptedEngine
from tests.proxy import toy_tokenizer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Path:
    return toy_tokenizer.build(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def engine(tokenizer) -> Iterator[ScriptedEngine]:
    with ScriptedEngine(tokenizer) as engine:
        yield engine


@pytest.fixture(scope="session")
def deployment(engine, tokenizer) -> Iterator[Deployment]:
    if bundles() is None:
        pytest.skip("POLAR_HARNESSES (folder made by `polar images bundle`) is not set")
    # Not below /tmp: a local sandbox has a /tmp of its own, and what it mounts must not lie there.
    with (
        tempfile.TemporaryDirectory(prefix="polar-harnesses-", dir="/var/tmp") as folder,
        Deployment(Path(folder), engine, tokenizer) as deployment,
    ):
        yield deployment


@pytest.fixture
def key(request) -> str:
    """A name for one run that no other has."""
    name = "".join(ch if ch.isalnum() else "-" for ch in request.node.callspec.id.lower()).strip("-")
    return f"{name}-{next(_numbers)}"


@pytest.fixture(scope="session")
def report() -> Iterator[Any]:
    """Takes a row of the report; POLAR_HARNESS_REPORT names the file that rows are merged into."""
    target = os.environ.get("POLAR_HARNESS_REPORT", "")

    def add(row: dict[str, Any]) -> None:
        if not target:
            return
        path = Path(target)
        rows = json.loads(path.read_text()) if path.is_file() else []
        names = ("harness", "dialect", "scenario", "runtime")
        rows = [r for r in rows if any(r[n] != row[n] for n in names)] + [row]
        rows.sort(key=lambda r: [r[n] for n in names])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")

    yield add
