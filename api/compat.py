"""The reference rollout server's routes, a thin layer over the same store: its clients can move over unchanged."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from api.compat_request import in_their_words, translate
from api.compat_results import task_status
from api.control import control
from api.status import snapshot
from api.wire import body, ident, query, reply
from polar.codec import to_json
from polar.errors import InvalidTask
from submission import submit


def routes() -> list[web.RouteDef]:
    return [
        web.post("/rollout/task/submit", create),
        web.get("/rollout/task/{task}", show),
        web.get("/rollout/status", status),
    ]


async def create(request: web.Request) -> web.Response:
    """Answers at once; 409 if the id was ever used here (the reference lets a finished one be overwritten)."""
    query(request)
    c = control(request)
    task = translate(await body(request))
    try:
        await c.call(submit, [task], c.store, c.objects, c.settings, base=None)
    except InvalidTask as e:
        raise in_their_words(e) from e
    return reply({"task_id": task.task_id, "status": "pending"})


async def show(request: web.Request) -> web.Response:
    """All results so far, with all their tokens."""
    query(request)
    c = control(request)
    task = ident(request, "task")
    data = await c.call(lambda: to_json(task_status(c, task)))
    return web.Response(body=data, content_type="application/json")


async def status(request: web.Request) -> web.Response:
    query(request)
    s: dict[str, Any] = await control(request).call(snapshot(request).read)
    states = s["states"]
    return reply(
        {
            "status": "ok",
            "pending_sessions": s["backlog"]["pending"] + s["backlog"]["delayed"],
            "active_sessions": sum(n for state, n in states.items() if state not in ("PENDING", "DONE")),
            "completed_sessions": states["DONE"],
            "nodes": [
                {
                    "node_id": name,
                    "healthy": n["alive"],
                    "draining": n["draining"],
                    "running_sessions": n["running"],
                    "ready_sessions": n["ready"],
                    "max_run_workers": n["slots"],
                }
                for name, n in s["nodes"].items()
            ],
        }
    )
