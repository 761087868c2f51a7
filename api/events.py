"""State changes as server-sent events."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import redis
from aiohttp import web

from api.control import Control, control
from api.wire import invalid, query
from polar.codec import to_json
from polar.errors import PolarError

HEARTBEAT_SECONDS = 5
MAX_LISTENERS = 64
_ID = re.compile(r"^\d{1,20}(-\d{1,20})?$")
_FIELDS = ("session", "state", "at", "detail")
LISTENERS: web.AppKey[set[Any]] = web.AppKey("listeners", set)


def routes() -> list[web.RouteDef]:
    return [web.get("/v1/events", events)]


async def events(request: web.Request) -> web.StreamResponse:
    """From now on, or after the event `?since=` (or the Last-Event-ID header); `0` is the oldest kept."""
    q = query(request, "since")
    c = control(request)
    since = q.get("since") or request.headers.get("Last-Event-ID", "")
    if since and not _ID.match(since):
        raise invalid("since", f"found '{since[:40]}', allowed: the id of an event, or 0")
    listeners = request.app[LISTENERS]
    if len(listeners) >= MAX_LISTENERS:
        raise PolarError(f"{MAX_LISTENERS} listeners are connected already", code="too_many")
    since = since or await _last(c)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"})
    await response.prepare(request)
    task = asyncio.current_task()
    listeners.add(task)
    try:
        await response.write(b": connected\n\n")
        while True:
            try:
                reply = await c.redis.xread({c.keys.events: since}, block=HEARTBEAT_SECONDS * 1000, count=500)
            except redis.RedisError as e:
                await response.write(f": {type(e).__name__}, trying again\n\n".encode())
                await asyncio.sleep(1)
                continue
            entries = reply[0][1] if reply else []
            if entries:
                since = entries[-1][0].decode()
            await response.write(b"".join(map(_event, entries)) or b": \n\n")
    except (ConnectionResetError, ConnectionAbortedError):
        return response  # the listener is gone
    finally:
        listeners.discard(task)


async def _last(c: Control) -> str:
    newest = await c.redis.xrevrange(c.keys.events, count=1)
    return newest[0][0].decode() if newest else "0"


def _event(entry: tuple[bytes, dict[bytes, bytes]]) -> bytes:
    data = {name: entry[1].get(name.encode(), b"").decode() for name in _FIELDS}
    return b"id: " + entry[0] + b"\nevent: state\ndata: " + to_json(data | {"at": float(data["at"])}) + b"\n\n"


async def stop(app: web.Application) -> None:
    """Streams have no end of their own."""
    listeners: set[Any] = app[LISTENERS]  # type: ignore[index]
    for task in list(listeners):
        task.cancel()
