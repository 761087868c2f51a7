"""The control plane's routes against a real store, with sessions driven as workers drive them."""

from __future__ import annotations

import asyncio
import hashlib
import json

import pytest

from polar.codec import decompress, unpack
from polar.result import SessionResult
from polar.store.capture import Grant, digest
from tests.client.pipeline import finish, same, task, to_run

SHELL = {"harness": "shell", "command": "true"}


def spec(task_id: str = "t1", **kw) -> dict:
    return {"task_id": task_id, "instruction": "go", "agent": SHELL} | kw


async def get(api, path: str, status: int = 200):
    reply = await api.get(path)
    data = await reply.json()
    assert reply.status == status, data
    return data


async def post(api, path: str, body=None, status: int = 200):
    reply = await api.post(path, json=body) if body is not None else await api.post(path)
    data = await reply.json()
    assert reply.status == status, data
    return data


async def test_submit_look_cancel(api, store):
    made = await post(api, "/v1/tasks", spec(num_samples=2, priority=3), 201)
    assert made == {"tasks": {"t1": ["t1.s0", "t1.s1"]}}
    assert store.task("t1").priority == 3
    shown = await get(api, "/v1/tasks/t1?spec=1")
    assert shown["states"] == {"PENDING": 2} and shown["spec"]["num_samples"] == 2 and shown["done"] == 0
    assert (await get(api, "/v1/sessions/t1.s0"))["state"] == "PENDING"
    assert (await post(api, "/v1/tasks/t1/cancel"))["cancelled"] == ["t1.s0", "t1.s1"]
    assert (await get(api, "/v1/tasks/t1"))["states"] == {"POSTRUN": 2}
    # No worker was told: the reaper has to find them overdue at once.
    assert {s.session_id for s in store.overdue_hints(60)} == {"t1.s0", "t1.s1"}
    assert store.redis.xlen(store.keys.events) > 0


async def test_many_tasks_are_all_or_nothing(api, store):
    made = await post(api, "/v1/tasks", {"tasks": [spec("a"), spec("b")]}, 201)
    assert list(made["tasks"]) == ["a", "b"]
    bad = await post(api, "/v1/tasks", {"tasks": [spec("c"), spec("d", num_samples=0)]}, 400)
    assert bad["error"]["code"] == "invalid_task" and bad["error"]["field"] == "tasks[1].num_samples"
    assert "found 0, allowed: whole number >= 1 and <= 4096" in bad["error"]["message"]
    taken = await post(api, "/v1/tasks", {"tasks": [spec("e"), spec("a")]}, 409)
    assert taken["error"] == {"code": "conflict", "message": "task 'a' exists already"}
    twice = await post(api, "/v1/tasks", {"tasks": [spec("f"), spec("f")]}, 400)
    assert "stands twice" in twice["error"]["message"]
    assert sorted(store.task_ids()) == ["a", "b"]


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"tasks": []}, "tasks", "a list of 1 to"),
        ({"tasks": [], "x": 1}, "x", "unknown field"),
        ([], "", "found a list"),
        (spec(comand="x"), "comand", "unknown field; allowed: agent"),
        (spec(agent={"harness": "nope"}), None, "unknown name 'nope'"),
        (spec(runtime={"prepare": [{"type": "upload_file", "source": "/etc/passwd", "target": "x"}]}), None, "object:"),
        (spec(runtime={"backend": "nope"}), None, "unknown name 'nope'"),
    ],
)
async def test_what_is_wrong_is_named(api, store, body, field, words):
    error = (await post(api, "/v1/tasks", body, 400))["error"]
    assert words in error["message"]
    assert field is None or error.get("field", "") == field
    assert store.task_ids() == []


async def test_bad_json_unknown_queries_and_paths(api):
    reply = await api.post("/v1/tasks", data=b"{")
    assert reply.status == 400 and "not valid JSON" in (await reply.json())["error"]["message"]
    reply = await api.post("/v1/tasks", data=b"[" * 100_000)
    assert reply.status == 400
    assert (await get(api, "/v1/tasks?limt=3", 400))["error"]["field"] == "limt"
    assert (await get(api, "/v1/tasks?limit=0", 400))["error"]["field"] == "limit"
    assert (await get(api, "/v1/nothing", 404))["error"]["code"] == "not_found"
    assert (await post(api, "/v1/status", {}, 405))["error"]["code"] == "method_not_allowed"
    for path in (
        "/v1/sessions/x:ledger",
        "/v1/tasks/t1%0A",
        "/v1/queues/a%20b",
        "/v1/tasks/x",
        "/v1/sessions/x",
        "/v1/tasks/x/results",
        "/v1/sessions/x/result",
    ):
        assert (await get(api, path, 404))["error"]["code"] == "not_found"
    for path in ("/v1/tasks/x/cancel", "/v1/sessions/x/cancel", "/v1/nodes/x/drain", "/v1/capture/x/close"):
        assert (await post(api, path, status=404))["error"]["code"] == "not_found"


async def test_pages_show_every_task_once_newest_first(api, store):
    for i in range(7):
        store.submit(task(f"t{i}"), "local")
    # Several of one instant, more than a page holds.
    store.redis.zadd(store.keys.tasks, {f"t{i}": 5.0 for i in range(1, 5)})
    seen, before = [], ""
    while True:
        page = await get(api, f"/v1/tasks?limit=2{before}")
        assert len(page["tasks"]) <= 2
        seen += [t["task_id"] for t in page["tasks"]]
        if page["next"] is None:
            break
        before = f"&before={page['next']}"
    assert seen == ["t6", "t5", "t0", "t4", "t3", "t2", "t1"]
    assert (await get(api, "/v1/tasks?before=rubbish", 400))["error"]["field"] == "before"


async def test_results_and_summary(api, store, objects):
    ids = store.submit(task(n=3), "local")
    written = finish(store, objects, ids[0])
    finish(store, objects, ids[2], termination="infra_error", verdict="not_evaluated", reward=None)
    found = await get(api, "/v1/tasks/t1/results")
    assert found["summary"] == {
        "total": 3, "done": 2, "terminations": {"finished": 1, "infra_error": 1},
        "verdicts": {"passed": 1, "not_evaluated": 1}, "rewarded": 1, "mean_reward": 1.0,
    }  # fmt: skip
    assert [r["session_id"] for r in found["results"]] == [ids[0], ids[2]]
    assert (await get(api, f"/v1/sessions/{ids[1]}/result", 409))["error"]["message"].startswith("session 't1.s1' is")
    whole = await get(api, f"/v1/sessions/{ids[0]}/result")
    assert whole["trajectory"]["traces"][0]["response_ids"] == [3, 4, 9, 5]
    bare = await get(api, f"/v1/sessions/{ids[0]}/result?tokens=0")
    assert bare["trajectory"]["traces"][0]["response_ids"] == []
    assert bare["trajectory"]["traces"][0]["metadata"] == {"prompt_tokens": 2, "response_tokens": 4}
    raw = await api.get(f"/v1/sessions/{ids[0]}/result?format=msgpack")
    assert same(unpack(decompress(await raw.read()), SessionResult), written)
    assert (await get(api, f"/v1/sessions/{ids[0]}/result?format=xml", 400))["error"]["field"] == "format"
    line = await get(api, f"/v1/sessions/{ids[0]}")
    assert line["ledger"][0]["attempt"] == 1 and line["timing"]["run"] >= 0 and "run_report" not in line


async def test_cancel_of_a_running_session_is_told_by_its_lease(api, store):
    (sid,) = store.submit(task(), "local")
    s = to_run(store, sid)
    assert (await post(api, f"/v1/sessions/{sid}/cancel"))["state"] == "RUNNING"
    assert store.renew([(sid, s.fence)], 60) == [2]


async def test_capture_only_from_open_to_result(api, store, objects):
    made = await post(api, "/v1/capture", {"task_id": "mine", "max_turns": 2, "timeout_seconds": 60}, 201)
    assert made["base_url"] == f"http://127.0.0.1:9/s/{made['api_key']}" and made["session_id"] == "mine.s0"
    grant = unpack(store.redis.get(store.keys.capability(digest(made["api_key"]))), Grant)
    assert (grant.session_id, grant.attempt, grant.max_turns, grant.model) == ("mine.s0", 1, 2, "policy")
    shown = await get(api, "/v1/sessions/mine.s0")
    assert (shown["state"], shown["mode"]) == ("RUNNING", "capture") and made["api_key"] not in json.dumps(shown)
    assert (await post(api, "/v1/capture/mine.s0/close"))["state"] == "POSTRUN"
    assert store.redis.hget(store.keys.attempt("mine.s0.a1"), "state") == b"closed"
    assert (await post(api, "/v1/capture/mine.s0/close"))["state"] == "POSTRUN", "a repeat changes nothing"
    assert [s.session_id for s in store.overdue_hints(60)] == ["mine.s0"]
    finish(store, objects, "mine.s0")
    assert (await post(api, "/v1/capture/mine.s0/close"))["state"] == "DONE"


async def test_capture_only_refusals(api, store):
    assert (await post(api, "/v1/capture", {"num_samples": 2}, 400))["error"]["field"] == "num_samples"
    assert "unknown name" in (await post(api, "/v1/capture", {"builder": {"strategy": "x"}}, 400))["error"]["message"]
    store.submit(task("managed"), "local")
    assert (await post(api, "/v1/capture", {"task_id": "managed"}, 409))["error"]["code"] == "conflict"
    assert (await post(api, "/v1/capture/managed.s0/close", status=409))["error"]["code"] == "conflict"
    # An open without a body is enough.
    assert (await post(api, "/v1/capture", status=201))["model"] == "policy"
    # Nobody may submit a managed task with the harness that stands for "the user's own".
    refused = await post(api, "/v1/tasks", spec(agent={"harness": "external"}), 400)
    assert "unknown name 'external'" in refused["error"]["message"]


async def test_uploads(api, objects, make_api):
    data = b"x" * 300_000
    name = hashlib.sha256(data).hexdigest()
    for _ in range(2):
        reply = await api.put("/v1/uploads", data=data)
        assert reply.status == 201
        assert await reply.json() == {"source": f"object://uploads/{name}", "sha256": name, "size": 300_000}
    assert objects.get(f"uploads/{name}") == data
    await post(
        api, "/v1/tasks",
        spec(runtime={"prepare": [{"type": "upload_file", "source": f"object://uploads/{name}", "target": "f"}]}), 201,
    )  # fmt: skip
    small = await make_api(upload_limit=1000)

    async def chunks():
        for _ in range(10):
            yield b"y" * 500

    for body in (b"y" * 5000, chunks()):  # with its length told, and without
        reply = await small.put("/v1/uploads", data=body)
        assert reply.status == 413 and (await reply.json())["error"]["code"] == "too_large"
    assert list(objects.list("uploads/")) == [f"uploads/{name}"]


async def test_an_upload_that_breaks_off_leaves_nothing(api, objects):
    _, writer = await asyncio.open_connection(api.host, api.port)
    head = f"PUT /v1/uploads HTTP/1.1\r\nHost: {api.host}\r\nContent-Length: 1000\r\n\r\n"
    writer.write(head.encode() + b"z" * 500)
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert await get(api, "/health") and list(objects.list("uploads/")) == []


async def test_nodes_status_queues_metrics(api, store, objects):
    ids = store.submit(task(n=3), "local")
    finish(store, objects, ids[0])
    store.cancel(ids[1])
    nodes = (await get(api, "/v1/nodes"))["nodes"]
    assert nodes["n1"]["alive"] and nodes["n1"]["slots"] == 1000
    assert (await post(api, "/v1/nodes/n1/drain"))["draining"] is True
    assert store.nodes()["n1"]["draining"]
    assert (await post(api, "/v1/nodes/n1/drain", {"draining": False}))["draining"] is False
    assert (await post(api, "/v1/nodes/n1/drain", {"draning": 1}, 400))["error"]["field"] == "draning"
    s = await get(api, "/v1/status")
    assert (s["states"]["DONE"], s["states"]["POSTRUN"], s["verdicts"]) == (1, 1, {"passed": 1})
    assert sum(s["states"].values()) == 3
    q = await get(api, "/v1/queues/results")
    assert q["results"] == {"length": 1, "consumer_groups": []} and q["groups"]["length"] == 0
    stream = store.keys.results("results")
    store.redis.xgroup_create(stream, "trainer", id="0")
    store.redis.xreadgroup("trainer", "c1", {stream: ">"})
    (g,) = (await get(api, "/v1/queues/results"))["results"]["consumer_groups"]
    assert (g["name"], g["pending"], g["dead"], g["consumers"][0]["name"]) == ("trainer", 1, 0, "c1")
    text = await (await api.get("/metrics")).text()
    assert 'polar_sessions{state="DONE"} 1.0' in text and 'polar_verdicts_total{verdict="passed"} 1.0' in text
    assert 'polar_node_slots{node="n1"} 1000.0' in text
    assert 'route="/v1/nodes/{node}/drain"' in text and "t1" not in text


async def _next_event(reply) -> tuple[str, dict]:
    event: dict[str, str] = {}
    while True:
        line = (await asyncio.wait_for(reply.content.readline(), 10)).decode().rstrip("\n")
        if not line and "data" in event:
            return event["id"], json.loads(event["data"])
        name, _, value = line.partition(": ")
        if name:
            event[name] = value


async def test_events_from_now_and_from_an_id(api, store):
    store.submit(task("old"), "local")
    async with api.get("/v1/events") as live:
        assert await live.content.readline() == b": connected\n"
        store.submit(task("new"), "local")
        _, data = await _next_event(live)
        assert (data["session"], data["state"]) == ("new.s0", "PENDING")
    async with api.get("/v1/events?since=0") as all_of_them:
        first, data = await _next_event(all_of_them)
        assert data["session"] == "old.s0"
    async with api.get("/v1/events", headers={"Last-Event-ID": first}) as rest:
        assert (await _next_event(rest))[1]["session"] == "new.s0"
    assert (await get(api, "/v1/events?since=x", 400))["error"]["field"] == "since"


async def test_health_and_page(api, objects, monkeypatch):
    assert await get(api, "/health") == {"status": "ok", "redis": True, "objects": True}
    page = await api.get("/")
    assert page.status == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "http://" not in (text := await page.text()) and "https://" not in text, "no outside assets"
