"""aiohttp's server with explicit limits, and errors below HTTP's surface in an envelope that model clients read."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from proxy import body
from proxy.dialects import FALLBACK
from proxy.failures import bad

log = logging.getLogger("polar.proxy")

HEAD_SECONDS = 30.0  # for the first request's headers to arrive in
KEEPALIVE = 75.0
MAX_LINE = 8190  # bytes of a request line
MAX_FIELD = 16384  # bytes of one header
MAX_FIELDS = 128


class Listener(web.Server):
    """`connections` beyond the limit are closed at once. Handlers are cancelled when their client goes away: that is how a
    generation learns of it. There is no access log: it would hold capabilities."""

    def __init__(self, handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], max_connections: int):
        super().__init__(
            handler,
            request_factory=self._request,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE,
            lingering_time=2.0,
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
            max_headers=MAX_FIELDS,
        )
        self.max_connections = max_connections

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        return web.BaseRequest(
            message, payload, protocol, writer, task, asyncio.get_running_loop(), client_max_size=body.LIMIT
        )

    def close_idle(self) -> None:
        """Close the connections without a request."""
        for handler in self.connections:
            if isinstance(handler, _Handler):
                handler.close_idle()

    def __call__(self) -> RequestHandler:
        return _Handler(self, loop=asyncio.get_running_loop(), **self._kwargs)


class _Handler(RequestHandler):
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        manager = self._manager
        if isinstance(manager, Listener) and len(manager.connections) > manager.max_connections:
            transport.abort()  # type: ignore[attr-defined]
            return
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self._no_head)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def close_idle(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self.force_close()

    def _no_head(self) -> None:
        if not self._request_count and self.transport is not None:
            self.transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What is no proper HTTP request. Neither the log nor the answer repeats any of it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        log.warning("no proper HTTP request", extra={"status": status, "why": type(exc).__name__})
        error = bad("this is not a proper HTTP request", code="bad_http")
        _, text = FALLBACK.error(error)
        response = web.Response(status=status, body=text, headers={"Content-Type": "application/json"})
        response.force_close()
        return response
