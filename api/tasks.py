"""Tasks: submit, list, look, cancel."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from api.control import Control, control
from api.views import task_line, task_view
from api.wire import body, flag, ident, invalid, number, query, reply
from polar.codec import convert
from polar.errors import InvalidTask
from polar.task import TaskRequest
from submission import submit
from submission.nudge import nudge

MAX_TASKS = 10_000


def routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/tasks", create),
        web.get("/v1/tasks", listing),
        web.get("/v1/tasks/{task}", show),
        web.post("/v1/tasks/{task}/cancel", cancel),
    ]


async def create(request: web.Request) -> web.Response:
    """A TaskRequest, or {"tasks": […]}: all or none."""
    query(request)
    c = control(request)
    tasks = parse(await body(request))
    ids = await c.call(submit, tasks, c.store, c.objects, c.settings, base=None)
    return reply({"tasks": ids}, 201)


def parse(data: Any) -> list[TaskRequest]:
    if not isinstance(data, dict) or "tasks" not in data:
        return [convert(data, TaskRequest, "body")]
    for key in data:
        if key != "tasks":
            raise invalid(str(key)[:80], "unknown field beside 'tasks'; allowed: tasks")
    items = data["tasks"]
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_TASKS:
        found = f"a list of {len(items)}" if isinstance(items, list) else "no list"
        raise invalid("tasks", f"found {found}, allowed: a list of 1 to {MAX_TASKS} tasks")
    out = []
    for i, item in enumerate(items):
        try:
            out.append(convert(item, TaskRequest, f"tasks[{i}]"))
        except InvalidTask as e:
            e.field = f"tasks[{i}].{e.field}" if e.field else f"tasks[{i}]"
            raise
    return out


async def listing(request: web.Request) -> web.Response:
    """Newest first. `next` is the `before` of the following page, null at the end."""
    q = query(request, "limit", "before")
    c = control(request)
    limit = number(q, "limit", 50, 1, 500)
    return reply(await c.call(_page, c, limit, q.get("before", "")))


def _page(c: Control, limit: int, before: str) -> dict[str, Any]:
    score, _, last = before.partition(":")
    try:
        high = repr(float(score)) if before else "+inf"
    except ValueError as e:
        raise invalid("before", "found something else than a 'next' of this listing") from e
    # Tasks of one instant are ordered by name, descending; the page's last may be one of several.
    found: list[tuple[str, float]] = []
    offset = 0
    while len(found) <= limit:
        rows = c.store.redis.zrevrangebyscore(c.keys.tasks, high, "-inf", start=offset, num=limit + 1, withscores=True)
        offset += len(rows)
        found += [(t.decode(), s) for t, s in rows if not before or s < float(score) or t.decode() < last]
        if len(rows) <= limit:
            break
    page = found[:limit]
    more = len(found) > limit
    return {
        "tasks": task_line(c.store, [t for t, _ in page]),
        "next": f"{page[-1][1]!r}:{page[-1][0]}" if more else None,
    }


async def show(request: web.Request) -> web.Response:
    """`?spec=1` adds the TaskRequest."""
    q = query(request, "spec")
    c = control(request)
    task = ident(request, "task")
    out = task_view(await c.call(c.store.task_status, task))
    if flag(q, "spec", False):
        out["spec"] = await c.call(c.store.task, task)
    return reply(out)


async def cancel(request: web.Request) -> web.Response:
    """Ask every session that isn't DONE to end. Each still gets its result."""
    query(request)
    c = control(request)
    return reply(await c.call(cancel_task, c, ident(request, "task")))


def cancel_task(c: Control, task: str) -> dict[str, Any]:
    before = {
        s.session_id: c.store.cancel(s.session_id) for s in c.store.task_status(task).sessions if s.state != "DONE"
    }
    nudge(c.store, before)
    return {"task_id": task, "cancelled": [s for s, state in before.items() if state != "DONE"]}
