"""The admin plane: health, metrics, and the pause for a weight update. Sandboxes never see it."""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from polar.errors import Conflict, InvalidTask, PolarError
from proxy.pausing import DrainTimeout, PauseRequest, ResumeRequest
from proxy.service import Service

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Admin:
    """`token`: what a bearer must show to change anything. Without one, only requests that were meant for loopback may, so
    that no web page can, and none at all where the plane listens elsewhere."""

    def __init__(self, service: Service, token: str, token_env: str, public: bool):
        self._service, self._token, self._token_env, self._public = service, token, token_env, public

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 16)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/pause", self._state)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/resume", self._resume)
        return app

    async def _health(self, _: web.Request) -> web.Response:
        """503 only for what makes this proxy useless: calls wait for engines, and the other models go on."""
        redis = await self._service.redis_up()
        ok = redis and not self._service.draining
        state = {
            "status": "ok" if ok else "unavailable",
            "store": redis,
            "draining": self._service.draining,
            "paused": self._service.pauses.state()["paused"],
            "engines": self._service.table.engines(),
        }
        return web.json_response(state, status=200 if ok else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._service.metrics.text(), headers=headers)

    async def _state(self, http: web.Request) -> web.Response:
        return self._refused(http) or web.json_response(self._service.pauses.state())

    async def _pause(self, http: web.Request) -> web.Response:
        """The caller going away ends a pause that is still draining."""
        if (refused := self._refused(http)) is not None:
            return refused
        try:
            return web.json_response(await self._service.pauses.pause(await _body(http, PauseRequest)))
        except PolarError as e:
            return _failed(e)

    async def _resume(self, http: web.Request) -> web.Response:
        if (refused := self._refused(http)) is not None:
            return refused
        try:
            return web.json_response(self._service.pauses.resume(await _body(http, ResumeRequest)))
        except PolarError as e:
            return _failed(e)

    def _refused(self, http: web.Request) -> web.Response | None:
        if self._token:
            given = http.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if hmac.compare_digest(given, f"Bearer {self._token}".encode()):
                return None
            answer = _answer(401, "unauthorized", "a valid 'Authorization: Bearer <token>' header is needed")
            answer.headers["WWW-Authenticate"] = "Bearer"
            return answer
        if self._public:
            return _answer(
                403, "forbidden", f"pausing needs a secret on an address that isn't loopback: set {self._token_env}"
            )
        names = [http.host, urlsplit(http.headers.get("Origin", "http://localhost")).netloc]
        if all(urlsplit(f"//{n}").hostname in _LOOPBACK for n in names):
            return None
        return _answer(403, "forbidden", "without a secret only requests from this machine are answered")


async def _body(http: web.Request, typ: type[Any]) -> Any:
    """Raises InvalidTask naming the field."""
    raw = await http.read() or b"{}"
    try:
        return msgspec.json.decode(raw, type=typ)
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as e:
        raise InvalidTask(f"body: {e}") from e


def _failed(e: PolarError) -> web.Response:
    status = 504 if isinstance(e, DrainTimeout) else 409 if isinstance(e, Conflict) else 400
    return _answer(status, e.code, e.message)


def _answer(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)
