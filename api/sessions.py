"""Sessions: look and cancel."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from api.control import Control, control
from api.views import session_view
from api.wire import ident, query, reply
from submission.nudge import nudge


def routes() -> list[web.RouteDef]:
    return [web.get("/v1/sessions/{session}", show), web.post("/v1/sessions/{session}/cancel", cancel)]


async def show(request: web.Request) -> web.Response:
    """The record, the ledger of its attempts, and what the proxy has counted in the present one."""
    query(request)
    c = control(request)
    return reply(await c.call(_show, c, ident(request, "session")))


def _show(c: Control, sid: str) -> dict[str, Any]:
    s = c.store.session(sid)
    out = session_view(s)
    out["ledger"] = c.store.ledger(sid)
    out["usage"], out["limit"] = c.capture.usage(s.attempt_id)
    return out


async def cancel(request: web.Request) -> web.Response:
    query(request)
    c = control(request)
    return reply(await c.call(_cancel, c, ident(request, "session")))


def _cancel(c: Control, sid: str) -> dict[str, Any]:
    before = c.store.cancel(sid)
    nudge(c.store, [sid])
    return {"session_id": sid, "state_before": before, "state": c.store.session(sid).state}
