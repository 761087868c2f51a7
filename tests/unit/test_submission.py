"""Submission: what a deployment doesn't allow is refused, local sources become objects, and all is written or nothing."""

from __future__ import annotations

import msgspec
import pytest

from polar.config import Settings
from polar.errors import Conflict, InvalidTask, Unreadable
from polar.objects import open_objects
from polar.task import AgentSpec, EvaluatorSpec, RuntimeSpec, TaskRequest, UploadDir, UploadFile
from submission import submit


def task(name: str, **kw) -> TaskRequest:
    return TaskRequest(task_id=name, instruction="x", agent=AgentSpec(harness="shell", command="true"), **kw)


@pytest.fixture
def world(store, tmp_path):
    settings = Settings(data_dir=str(tmp_path / "data"))
    return store, open_objects(settings.objects_url), settings, tmp_path


@pytest.mark.parametrize("where", ["runtime", "evaluator"])
@pytest.mark.parametrize("backend", ["local", "runtimes.local:LocalRuntime"])
def test_only_allowed_back_ends(world, where, backend):
    store, objects, _, folder = world
    settings = Settings(data_dir=str(folder), runtimes=["docker"], default_runtime="docker")
    image = RuntimeSpec(image="x")
    if where == "runtime":
        bad = task("t", runtime=RuntimeSpec(backend=backend))
    else:
        evaluator = EvaluatorSpec(name="session_completed", runtime=RuntimeSpec(backend=backend))
        bad = task("t", runtime=image, evaluator=evaluator)
    with pytest.raises(InvalidTask, match=rf"{where}.*'{backend}' is not allowed in this deployment; allowed: docker"):
        submit([bad], store, objects, settings)
    assert submit([task("t", runtime=image)], store, objects, settings) == {"t": ["t.s0"]}


def test_sources_become_objects_and_equal_ones_the_same(world):
    store, objects, settings, folder = world
    (folder / "repo").mkdir()
    (folder / "repo" / "a.txt").write_text("a")
    steps = [UploadDir(source="repo", target="/work"), UploadFile(source="repo/a.txt", target="/work/b")]
    spec = RuntimeSpec(prepare=steps, evaluation_prepare=steps[:1])
    submit([task("t", runtime=spec)], store, objects, settings, base=folder)
    stored = store.task("t").runtime
    assert all(p.source.startswith("object://uploads/") for p in stored.prepare)
    assert stored.evaluation_prepare[0].source == stored.prepare[0].source
    assert len(list(objects.list("uploads/"))) == 2
    with pytest.raises(InvalidTask, match=r"runtime.prepare\[0\].source"):
        submit([task("u", runtime=spec)], store, objects, settings)


def test_a_taken_id_stops_the_whole_submission(world):
    store, objects, settings, _ = world
    submit([task("b")], store, objects, settings)
    with pytest.raises(Conflict, match="'b' exists already"):
        submit([task("a"), task("b"), task("c")], store, objects, settings)
    with pytest.raises(InvalidTask, match="stands twice"):
        submit([task("a"), task("a")], store, objects, settings)
    assert store.task_ids() == ["b"] and store.backlog()["pending"] == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"num_samples": 5000}, r"^task 't': num_samples: found 5000, allowed: whole number >= 1 and <= 4096"),
        ({"agent_timeout_seconds": 1e9}, r"^task 't': agent_timeout_seconds: "),
        ({"metadata": {"x": object()}}, r"^task 't': can't be stored: "),
        ({"labels": {"x": 1 << 70}}, r"^task 't': "),
    ],
)
def test_what_no_worker_could_read_is_not_written(world, wrong, why):
    """Tasks made in Python: nobody has checked them yet."""
    store, objects, settings, _ = world
    with pytest.raises(InvalidTask, match=why):
        submit([task("a"), task("t", **wrong)], store, objects, settings)
    with pytest.raises(InvalidTask):
        store.submit(task("t", **wrong), "local")
    assert store.task_ids() == []


def test_what_a_newer_version_wrote_is_said_to_be_unreadable(store):
    store.submit(task("t"), "local")
    newer = msgspec.msgpack.decode(store.redis.hget(store.keys.task("t"), "spec")) | {"new_field": 1}
    store.redis.hset(store.keys.task("t"), "spec", msgspec.msgpack.encode(newer))
    with pytest.raises(Unreadable, match=r"task 't' can't be read by this version: .*new_field"):
        store.task("t")
