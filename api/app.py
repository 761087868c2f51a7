"""The control plane's application: routes, middlewares, background delivery of callbacks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

from api import callbacks, capture, compat, dashboard, events, metrics, results, sessions, status, tasks, uploads
from api.control import CONTROL, Control
from api.guard import auth, errors, timing

# A submission of many tasks; files go through /v1/uploads.
BODY_LIMIT = 64 << 20


def make_app(
    control: Control, token: str, *, local_only: bool = True, callback_options: dict[str, Any] | None = None
) -> web.Application:
    """`token` "" leaves it open; `local_only` then refuses requests that were not meant for loopback."""
    snapshot = status.Snapshot(control)
    registry, seconds = metrics.make(snapshot)
    app = web.Application(
        client_max_size=BODY_LIMIT, middlewares=[timing(seconds), auth(token, local_only=local_only), errors]
    )
    app[CONTROL] = control
    app[status.SNAPSHOT] = snapshot
    app[metrics.REGISTRY] = registry
    app[events.LISTENERS] = set()
    for part in (tasks, sessions, results, capture, events, status, uploads, metrics, compat, dashboard):
        app.add_routes(part.routes())

    async def background(_: web.Application) -> AsyncIterator[None]:
        try:
            async with callbacks.serving(control, **(callback_options or {})):
                yield
        finally:
            await control.close()

    app.cleanup_ctx.append(background)
    app.on_shutdown.append(events.stop)
    return app
