"""The sandbox-facing HTTP side: which dialect, which session, which action."""

from __future__ import annotations

import functools
import logging
import re
import time
from typing import Any

from aiohttp import web

from polar.errors import PolarError
from polar.store.capture import Grant
from proxy import body
from proxy.delivery import Delivery, json_response
from proxy.dialects import DIALECTS, FALLBACK
from proxy.dialects.base import Call, Dialect, Route
from proxy.failures import CallError, unknown_capability
from proxy.reading import Reading
from proxy.service import Service

log = logging.getLogger("polar.proxy")

HEARTBEAT = 8.0
_PREFIX = re.compile(r"^/s/([^/]*)(/.*)?$", re.S)
_ROUTES: list[tuple[Dialect, Route, re.Pattern[str]]] = [
    (d, r, re.compile(r.path + r"/?")) for d in DIALECTS for r in d.routes
]


class Front:
    def __init__(self, service: Service, heartbeat: float = HEARTBEAT):
        self._service = service
        self._heartbeat = heartbeat
        self._reading = Reading()

    def close(self) -> None:
        self._reading.close()

    async def handle(self, http: web.BaseRequest) -> web.StreamResponse:
        """Every request."""
        response = await self._answered(http)
        if self._service.draining and not response.prepared:
            response.force_close()  # a fresh connection may reach this proxy's successor
        return response

    async def _answered(self, http: web.BaseRequest) -> web.StreamResponse:
        """Whatever goes wrong is answered in the dialect's envelope."""
        capability, path = _split(http)
        dialect: Dialect = FALLBACK
        action = "none"
        try:
            dialect, route, params = _route(http, path)
            action = route.action
            response = await self._act(http, dialect, route, params, capability)
            self._service.metrics.calls.labels(dialect.name, action, str(response.status)).inc()
            return response
        except CallError as e:
            error = e
        except PolarError as e:
            log.error("call failed", extra={"code": e.code})  # its message may quote what it failed on
            error = CallError("internal", e.message, code=e.code)
        except ConnectionError:
            raise
        except Exception:
            log.exception("call failed")
            error = CallError("internal", "the proxy failed to serve this call")
        dialect = getattr(error, "dialect", dialect)
        status, text = dialect.error(error)
        self._service.metrics.calls.labels(dialect.name, action, str(status)).inc()
        return json_response(status, text, error)

    async def _act(
        self, http: web.BaseRequest, dialect: Dialect, route: Route, params: dict[str, str], capability: str | None
    ) -> web.StreamResponse:
        try:
            if route.action == "websocket":
                raise CallError("upgrade_refused", "WebSockets are not served here: use HTTP", code="websocket_refused")
            grant = await self._service.store.grant(capability if capability is not None else _key(http))
            if route.action in ("models", "model"):
                return await self._models(dialect, params, grant)
            with self._service.gate.call(grant.attempt_id):
                return await self._serve(http, dialect, route, params, grant)
        except CallError as e:
            e.dialect = dialect  # type: ignore[attr-defined]
            raise

    async def _serve(
        self, http: web.BaseRequest, dialect: Dialect, route: Route, params: dict[str, str], grant: Grant
    ) -> web.StreamResponse:
        metrics = self._service.metrics
        headers = {k.lower(): v for k, v in http.headers.items()}
        call = Call(params=params, query=dict(http.query), headers=headers)
        async with self._service.gate.body(grant.attempt_id, http.content_length):
            raw = await body.receive(http)
            begun = time.monotonic()
            recall = functools.partial(self._service.recall, grant)
            request = await self._reading.request(raw, dialect, call, recall)
            del raw
        metrics.body.observe(http.content.total_bytes)
        if route.action == "count":
            return json_response(200, dialect.counted(await self._service.count(grant, request)))
        generation = await self._service.generate(grant, request, dialect.name)
        joined = generation.accepted
        response = await Delivery(http, dialect, generation, request, metrics).run(self._heartbeat)
        if not joined:
            metrics.added.observe(max(0.0, time.monotonic() - begun - generation.waited))
        return response

    async def _models(self, dialect: Dialect, params: dict[str, str], grant: Grant) -> web.Response:
        await self._service.store.check_open(grant)
        table = self._service.table
        if "model" in params:
            return json_response(200, dialect.model(table.card(params["model"], grant.model)))
        return json_response(200, dialect.models(table.cards(grant.model)))


def _split(http: web.BaseRequest) -> tuple[str | None, str]:
    """(capability or None, path behind it)."""
    path = http.path
    if m := _PREFIX.match(path):
        return m[1], m[2] or "/"
    return None, path


def _route(http: web.BaseRequest, path: str) -> tuple[Dialect, Route, dict[str, str]]:
    other: Dialect | None = None
    method = http.method
    for dialect, route, pattern in _ROUTES:
        if m := pattern.fullmatch(path):
            if route.marks and not any(k in http.headers or k in http.query for k in route.marks):
                continue
            if route.method == method:
                return dialect, route, m.groupdict()
            other = other or dialect
    if other is not None:
        raise _with(other, CallError("method_not_allowed", f"{method} is not allowed here", code="method_not_allowed"))
    # The path is the caller's own; still it isn't echoed, for it may hold what it shouldn't.
    raise _with(_spoken(http, path), CallError("not_found", "unknown path", code="unknown_path"))


def _spoken(http: web.BaseRequest, path: str) -> Dialect:
    """The dialect of a caller whose path nobody serves."""
    for dialect in DIALECTS:
        marks = {m for r in dialect.routes for m in r.marks}
        if dialect.own.match(path) or any(m in http.headers or m in http.query for m in marks):
            return dialect
    return FALLBACK


def _with(dialect: Dialect, error: CallError) -> CallError:
    error.dialect = dialect  # type: ignore[attr-defined]
    return error


def _key(http: web.BaseRequest) -> str:
    """The capability as the API key of whatever provider the client believes in."""
    headers: Any = http.headers
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if value := headers.get(name, "").strip():
            return value
    if value := http.query.get("key", "").strip():
        return value
    raise unknown_capability()
