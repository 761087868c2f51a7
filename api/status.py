"""The deployment at a glance: backlog, states, counters, nodes, queues."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import redis
from aiohttp import web
from msgspec import Struct

from api.control import Control, control
from api.wire import ident, query, read, reply
from polar.client import dead_key
from polar.errors import NotFound
from polar.session import STATES

CACHE_SECONDS = 1.0
HEALTH_SECONDS = 5.0
SNAPSHOT = web.AppKey("snapshot", object)


class Snapshot:
    """`read` (blocking) at most once a second, however many ask."""

    def __init__(self, c: Control):
        self.c = c
        self._lock = threading.Lock()
        self._at = 0.0
        self._value: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        with self._lock:
            if time.monotonic() - self._at > CACHE_SECONDS or not self._value:
                self._value = self._read()
                self._at = time.monotonic()
            return self._value

    def _read(self) -> dict[str, Any]:
        store, keys = self.c.store, self.c.keys
        # One command for the states of all open sessions: their ids needn't travel.
        open_states = store.redis.sort(keys.open, by="nosort", get=f"{keys.session('*')}->state")
        counts = Counter(s.decode() for s in open_states if s)
        done = {k.decode(): int(v) for k, v in store.redis.hgetall(keys.done).items()}
        terminations = _part(done, "termination:")
        now = store.now()
        return {
            "time": now,
            "backlog": store.backlog(),
            "states": {s: counts[s] for s in STATES if s != "DONE"} | {"DONE": sum(terminations.values())},
            "terminations": terminations,
            "verdicts": _part(done, "verdict:"),
            "nodes": nodes(self.c, now),
        }


def _part(done: dict[str, int], prefix: str) -> dict[str, int]:
    return {k.removeprefix(prefix): n for k, n in sorted(done.items()) if k.startswith(prefix)}


def nodes(c: Control, now: float) -> dict[str, Any]:
    limit = c.settings.node_timeout_seconds
    return {name: n | {"alive": now - n["beat"] <= limit} for name, n in c.store.nodes().items()}


def routes() -> list[web.RouteDef]:
    return [
        web.get("/health", health),
        web.get("/v1/status", status),
        web.get("/v1/nodes", node_list),
        web.post("/v1/nodes/{node}/drain", drain),
        web.get("/v1/queues/{queue}", queue),
    ]


async def health(request: web.Request) -> web.Response:
    """Are Redis and the object store there? 503 says which is not."""
    c = control(request)
    parts = {"redis": c.store.redis.ping, "objects": lambda: c.objects.exists("health")}
    found = {}
    for part, probe in parts.items():
        try:
            await asyncio.wait_for(c.call(probe), HEALTH_SECONDS)
            found[part] = True
        except Exception:  # whatever it is: not healthy
            found[part] = False
    ok = all(found.values())
    return reply({"status": "ok" if ok else "unavailable", **found}, 200 if ok else 503)


async def status(request: web.Request) -> web.Response:
    query(request)
    return reply(await control(request).call(snapshot(request).read))


def snapshot(request: web.Request) -> Snapshot:
    value = request.app[SNAPSHOT]
    assert isinstance(value, Snapshot)
    return value


async def node_list(request: web.Request) -> web.Response:
    query(request)
    c = control(request)
    return reply({"nodes": await c.call(lambda: nodes(c, c.store.now()))})


class Drain(Struct, forbid_unknown_fields=True):
    draining: bool = True


async def drain(request: web.Request) -> web.Response:
    """A draining node gets no new sessions; {"draining": false} ends that."""
    query(request)
    c = control(request)
    wanted = await read(request, Drain, empty=b"{}")
    node = request.match_info["node"]

    def change() -> dict[str, Any]:
        if not c.store.redis.sismember(c.keys.nodes, node):
            raise NotFound(f"no node '{node}'")
        c.store.node_drain(node, wanted.draining)
        if not wanted.draining:
            c.store.ring()
        return c.store.nodes()[node]

    return reply({"node": node, **await c.call(change)})


async def queue(request: web.Request) -> web.Response:
    """Lengths of a results queue's streams, and what each consumer group has pending or given up."""
    query(request)
    c = control(request)
    name = ident(request, "queue")

    def look() -> dict[str, Any]:
        parts = {"results": c.keys.results(name), "groups": c.keys.groups(name)}
        return {"queue": name, **{part: _stream(c, key) for part, key in parts.items()}}

    return reply(await c.call(look))


def _stream(c: Control, key: str) -> dict[str, Any]:
    r = c.store.redis
    try:
        groups = r.xinfo_groups(key)
    except redis.ResponseError:  # nothing was written or read yet
        return {"length": 0, "consumer_groups": []}
    out = []
    for g in groups:
        name = g["name"].decode()
        consumers = [
            {"name": m["name"].decode(), "pending": m["pending"], "idle_seconds": m["idle"] / 1000}
            for m in r.xinfo_consumers(key, name)
        ]
        out.append({"name": name, "pending": g["pending"], "dead": r.llen(dead_key(key, name)), "consumers": consumers})
    return {"length": r.xlen(key), "consumer_groups": out}
