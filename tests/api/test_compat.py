"""The reference server's documented client against this control plane: submit, poll, callback."""

from __future__ import annotations

import pytest

from polar.errors import InvalidTask
from polar.task import AgentSpec
from tests.api.test_callbacks import until
from tests.client.pipeline import finish, task

SHELL = {"harness": "shell", "custom_shell": {"command": "solve '{{INSTRUCTION}}'", "env": {"A": "b"}}}


def request(**kw) -> dict:
    return {"task_id": "ref-1", "instruction": "fix it", "agent": SHELL} | kw


async def submit(api, body: dict, status: int = 200) -> dict:
    reply = await api.post("/rollout/task/submit", json=body)
    data = await reply.json()
    assert reply.status == status, data
    return data


async def poll(api, task_id: str = "ref-1") -> dict:
    reply = await api.get(f"/rollout/task/{task_id}")
    assert reply.status == 200
    return await reply.json()


async def test_submit_poll_callback(api, store, objects, receiver):
    body = request(
        num_samples=3,
        timeout_seconds=1200,
        runtime={"backend": "local", "prepare": [{"type": "exec", "command": "true"}], "env": {"X": "y"}},
        builder={"strategy": "prefix_merging", "config": {}},
        evaluator={"strategy": "session_completed"},
        callback_url=receiver.url,
        metadata={"group_id": "g7", "agent_timeout": 900},
    )
    assert (await submit(api, body))["task_id"] == "ref-1"
    ours = store.task("ref-1")
    assert (ours.num_samples, ours.timeout_seconds, ours.agent_timeout_seconds) == (3, 1200, 900)
    assert ours.agent == AgentSpec(harness="shell", command="solve '{{INSTRUCTION}}'", env={"A": "b"})
    assert ours.runtime.network == "internet" and ours.runtime.prepare[0].command == "true"
    assert ours.builder.strategy == "prefix_merging" and ours.evaluator.name == "session_completed"
    assert (await poll(api))["status"] == "pending"

    finish(store, objects, "ref-1.s0")
    half = await poll(api)
    assert (half["status"], half["total_sessions"], half["completed_sessions"]) == ("running", 3, 1)
    finish(store, objects, "ref-1.s1", termination="agent_timeout", verdict="failed", reward=0.0)
    finish(store, objects, "ref-1.s2", termination="infra_error", verdict="not_evaluated", reward=None)

    full = await poll(api)
    assert full["status"] == "completed"
    assert [r["status"] for r in full["results"]] == ["COMPLETED", "TIMEOUT", "ERROR"]
    good, late, broken = full["results"]
    (trace,) = good["trajectory"]["traces"]
    assert trace["prompt_ids"] == [1, 2] and trace["response_ids"] == [3, 4, 9, 5]
    assert trace["loss_mask"] == [1, 1, 0, 1] and trace["response_logprobs"] == [-0.5, -0.25, 0.0, -1.0]
    assert trace["reward"] == 1.0 and trace["finish_reason"] == "stop" and trace["metadata"]["group_id"] == "g7"
    assert good["timing"]["run_ms"] == 2000 and good["node_id"] == "n1" and good["error"] is None
    assert late["trajectory"]["traces"], "a timeout keeps its traces"
    assert broken["trajectory"]["traces"][0]["reward"] is None and broken["error"]

    await until(lambda: receiver.bodies)
    (called,) = receiver.bodies
    assert called["results"] == full["results"] and called["status"] == "completed" and called["result_paths"] == []


async def test_a_task_of_errors_only_has_failed_and_a_lost_object_is_an_error(api, store, objects):
    for name, kw in (
        ("cancelled", {"termination": "cancelled", "verdict": "not_evaluated", "reward": None}),
        ("unjudged", {"verdict": "evaluator_error", "reward": None}),
        ("crashed", {"termination": "agent_error", "verdict": "not_evaluated", "reward": None}),
        ("lost", {"write": False}),
    ):
        (sid,) = store.submit(task(name), "local")
        finish(store, objects, sid, **kw)
        found = await poll(api, name)
        assert (found["status"], found["results"][0]["status"]) == ("failed", "ERROR"), name
        assert found["results"][0]["error"]
    (sid,) = store.submit(task("judged"), "local")
    finish(store, objects, sid, termination="agent_error", verdict="failed", reward=0.0)
    assert (await poll(api, "judged"))["results"][0]["status"] == "COMPLETED"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"runtime": {"backend": "local", "storage_mb": 0}}, "runtime.storage_mb"),
        ({"runtime": {"backend": "local", "storage_mb": "5GB"}}, "runtime.storage_mb"),
        ({"runtime": {"import_path": "a:B"}}, "runtime.import_path"),
        ({"runtime": {"network": "my-net"}}, "runtime.network"),
        ({"runtime": {"kwargs": {"privileged": True}}}, "runtime.kwargs.privileged"),
        ({"runtime": {"kwargs": {"volumes": ["/a:/b"]}}}, "runtime.kwargs.volumes[0]"),
        ({"runtime": {"prepare": [{"type": "exec"}]}}, "runtime.prepare[0].command"),
        ({"metadata": {"agent_timeout": "soon"}}, "metadata.agent_timeout"),
        ({"metadata": {"agent_timeout": True}}, "metadata.agent_timeout"),
        ({"early_stop_min_usable_sessions": 2}, "early_stop_min_usable_sessions"),
        ({"agent": {"harness": "shell"}}, "agent"),
        ({"agent": SHELL | {"skills_path": "s"}}, "agent.custom_shell"),
        ({"surprise": 1}, "surprise"),
        ({"num_samples": 0}, "num_samples"),
        ({"evaluator": {"strategy": "no_such"}}, "evaluator.strategy"),
        ({"runtime": {"backend": "local", "eval_prepare": [{"type": "upload_dir", "source": "/x", "target": "y"}]}},
         "runtime.eval_prepare"),
    ],
)  # fmt: skip
async def test_what_cannot_be_kept_is_refused_by_the_clients_own_name(api, store, change, field):
    error = (await submit(api, request(**change), 400))["error"]
    assert error["field"] == field and field in error["message"]
    assert store.task_ids() == []


def test_translation_of_shell_network_and_groups():
    from api.compat_request import translate

    shell = {"harness": "shell", "custom_shell": {"command": "a; b", "cwd": "/my dir"}}
    ours = translate(request(agent=shell, num_samples=4, early_stop_min_usable_sessions=2, dispatch_priority=9))
    assert ours.agent.command == "cd '/my dir' && { a; b\n}"
    assert (ours.group.mode, ours.group.k, ours.group.cancel_rest, ours.priority) == ("min_k", 2, True, 9)
    assert ours.builder.strategy == "per_request" and ours.runtime.network == "proxy-only"
    for runtime, network in (
        ({}, "internet"),
        ({"network": "host"}, "internet"),
        ({"network": "none"}, "proxy-only"),
        ({"allow_internet": False}, "proxy-only"),
    ):
        assert translate(request(runtime=runtime)).runtime.network == network
    assert translate(request(runtime={"storage_mb": 5})).runtime.disk_mb == 5
    volumes = translate(request(runtime={"kwargs": {"volumes": ["/a:/b:ro"]}})).runtime.volumes
    assert [(v.source, v.target) for v in volumes] == [("/a", "/b")]
    with pytest.raises(InvalidTask):
        translate([])


async def test_status_and_conflict(api, store, objects):
    await submit(api, request())
    assert (await submit(api, request(), 409))["error"]["code"] == "conflict"
    store.node_beat("n1", ready=4, slots=8, backends=["local"])
    reply = await api.get("/rollout/status")
    data = await reply.json()
    assert data["pending_sessions"] == 1 and data["nodes"][0]["max_run_workers"] == 8
    assert (await api.get("/rollout/task/none")).status == 404
    finish(store, objects, "ref-1.s0")
    assert (await poll(api))["status"] == "completed"
