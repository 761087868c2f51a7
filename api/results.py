"""Results: references and a summary per task, and the whole object per session."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aiohttp import web

from api.control import Control, control
from api.wire import flag, ident, invalid, query, reply
from polar.codec import to_json
from polar.errors import Conflict
from polar.export import read_result
from polar.result import SessionResult
from polar.session import Session


def routes() -> list[web.RouteDef]:
    return [web.get("/v1/tasks/{task}/results", listing), web.get("/v1/sessions/{session}/result", show)]


async def listing(request: web.Request) -> web.Response:
    query(request)
    c = control(request)
    status = await c.call(c.store.task_status, ident(request, "task"))
    done = [s for s in status.sessions if s.state == "DONE"]
    rewards = [s.reward for s in done if s.reward is not None]
    summary = {
        "total": status.total,
        "done": len(done),
        "terminations": dict(Counter(s.termination for s in done)),
        "verdicts": dict(Counter(s.verdict for s in done)),
        "rewarded": len(rewards),
        "mean_reward": sum(rewards) / len(rewards) if rewards else None,
    }
    return reply({"task_id": status.task_id, "summary": summary, "results": [_reference(s) for s in done]})


def _reference(s: Session) -> dict[str, Any]:
    names = ("session_id", "index", "attempt", "termination", "verdict", "reward")
    return {n: getattr(s, n) for n in names} | {"key": s.result, "done_at": s.done_at}


async def show(request: web.Request) -> web.Response:
    """The SessionResult as JSON (`?tokens=0` leaves the arrays out), or with `?format=msgpack` the object as it is
    stored: zstd-compressed msgpack."""
    q = query(request, "format", "tokens")
    c = control(request)
    form = q.get("format", "json")
    if form not in ("json", "msgpack"):
        raise invalid("format", f"found '{form[:40]}', allowed: json, msgpack")
    s = await c.call(c.store.session, ident(request, "session"))
    if s.state != "DONE":
        raise Conflict(f"session '{s.session_id}' is {s.state}; it has a result when it is DONE")
    if form == "msgpack":
        data = await c.call(c.objects.get, s.result)
        return web.Response(body=data, content_type="application/zstd")
    tokens = flag(q, "tokens", True)
    return web.Response(body=await c.call(_json, c, s.result, tokens), content_type="application/json")


def _json(c: Control, key: str, tokens: bool) -> bytes:
    result = read_result(c.objects, key)
    return to_json(result if tokens else without_tokens(result))


def without_tokens(result: SessionResult) -> SessionResult:
    for t in result.trajectory.traces:
        t.metadata |= {"prompt_tokens": len(t.prompt_ids), "response_tokens": len(t.response_ids)}
        t.prompt_ids = t.response_ids = t.loss_mask = t.logprobs = t.prompt_ids[:0]
    result.trajectory.packed = None
    return result
