"""`polar results transcript` on stored objects."""

from __future__ import annotations

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from cli.transcript import add_to
from polar.codec import compress, pack
from polar.completion import Completion
from polar.errors import NotFound
from polar.objects import open_objects
from polar.result import Artifact, SessionResult, capture_key, result_key
from polar.trace import Trajectory

ID = "c-01a228f81492e085608d2c24"


@pytest.fixture
def url(tmp_path) -> str:
    store = open_objects(f"file://{tmp_path}")
    one = np.zeros(1, dtype="<i4")
    completion = Completion(
        completion_id=ID, session_id="t.s0", attempt=1, index=0, prompt_tail=one, sampled_ids=one, role="main",
        logprobs=np.zeros(1, dtype="<f4"), response={"role": "assistant", "content": "Look [there]."}, labels={"session": "x"},
    )  # fmt: skip
    entries = [
        {"role": "user", "content": "Do it."},
        {"role": "assistant", "id": f"msg_{ID}", "content": "Look [there]."},
    ]
    store.put("artifacts/a", "".join(json.dumps(e) + "\n" for e in entries).encode())
    store.put("artifacts/log", b'{"role": "assistant", "content": "Look [there]."}\n')
    key = capture_key("t", "t.s0", 1)
    store.put(key, compress(pack([completion])))
    result = SessionResult(
        session_id="t.s0", task_id="t", sample_index=0, attempt=1, termination="finished", trajectory=Trajectory(builder="none"),
        capture_key=key,
        artifacts=[Artifact(name="agent.log", key="artifacts/log", size=1), Artifact(name="~/.polar/x.jsonl", key="artifacts/a", size=1)],
    )  # fmt: skip
    store.put(result_key("t", "t.s0", 1), compress(pack(result)))
    bare = SessionResult(
        session_id="u.s0", task_id="u", sample_index=0, attempt=1, termination="finished", trajectory=Trajectory(builder="none")
    )  # fmt: skip
    store.put(result_key("u", "u.s0", 1), compress(pack(bare)))
    return f"file://{tmp_path}"


@pytest.fixture
def app() -> typer.Typer:
    app = typer.Typer()
    app.command()(lambda: None)  # with one command alone, typer takes no name
    add_to(app)
    return app


def test_it_shows_where_the_transcript_speaks_of_a_completion(app, url):
    result = CliRunner().invoke(app, ["transcript", "t.s0", "--objects", url])
    assert result.exit_code == 0, result.exception
    text = " ".join(result.output.split())
    assert f"#0 {ID} main first 1 tokens session=x" in text and "Look [there]." in text
    assert "answer ~/.polar/x.jsonl:2" in text and "agent.log" not in text


def test_as_json(app, url):
    result = CliRunner().invoke(app, ["transcript", "t.s0", "--objects", url, "--json"])
    rows = [json.loads(line) for line in result.output.splitlines()]
    assert [(r["kind"], r["completion_id"]) for r in rows] == [("", ""), ("answer", ID)]


def test_without_a_capture(app, url):
    result = CliRunner().invoke(app, ["transcript", "u.s0", "--objects", url])
    assert isinstance(result.exception, NotFound)
