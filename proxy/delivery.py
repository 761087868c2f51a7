"""Bringing a generation to its client: as a stream or whole, and knowing whether it arrived."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time

from aiohttp import web

from proxy.dialects.base import Answer, Dialect
from proxy.failures import CallError
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.neutral import Finish, Request

log = logging.getLogger("polar.proxy")

# Headers go out when the engine has the request: until then a failure is still a status. Later than this they go anyway.
HEADERS_WITHIN = 5.0


def json_response(status: int, body: bytes, error: CallError | None = None) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if error is not None and error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    return web.Response(status=status, body=body, headers=headers)


class Delivery:
    """One client of a generation that it already listens to."""

    def __init__(self, http: web.Request, dialect: Dialect, generation: Generation, request: Request, metrics: Metrics):
        self._http, self._dialect, self._generation, self._request = http, dialect, generation, request
        self._metrics = metrics

    async def run(self, heartbeat: float) -> web.StreamResponse:
        """Answer the client. Being cancelled (it went away) leaves the generation."""
        g = self._generation
        try:
            if self._request.stream:
                return await self._stream(heartbeat)
            return await self._whole()
        finally:
            g.leave()

    def _answer(self) -> Answer:
        g = self._generation
        model = self._request.model or g.served.key
        return Answer(
            id=g.id, model=model, created=int(g.created), request=self._request, prompt_tokens=g.prompt_tokens
        )

    async def _whole(self) -> web.StreamResponse:
        g = self._generation
        while not g.done:
            await g.change(len(g.events), 3600.0)
        if g.error is not None:
            return self._refuse(g.error)
        response = json_response(200, self._dialect.whole(self._answer(), g.events))
        await response.prepare(self._http)
        await response.write_eof()
        self._delivered()
        return response

    async def _stream(self, heartbeat: float) -> web.StreamResponse:
        g = self._generation
        begun = time.monotonic()
        while not (g.done or g.accepted or g.events or time.monotonic() - begun > HEADERS_WITHIN):
            await g.change(0, HEADERS_WITHIN)
        if g.error is not None:
            return self._refuse(g.error)
        encoder = self._dialect.encoder(self._answer())
        response = web.StreamResponse(headers=encoder.headers)
        # Reverse proxies and the sandbox's relay must not collect the stream.
        response.headers["X-Accel-Buffering"] = "no"
        await response.prepare(self._http)
        await response.write(encoder.start())
        seen = 0
        while True:
            moved = await g.change(seen, heartbeat)
            if g.rewritten and seen:
                return await self._break_off(response)
            new = [] if g.rewritten and not g.done else g.events[seen:]
            if new:
                seen += len(new)
                await response.write(b"".join(encoder.event(e) for e in new))
                if isinstance(new[-1], Finish):
                    break
            elif g.done:
                return await self._break_off(response)
            elif not moved or g.rewritten:
                await response.write(encoder.heartbeat())
                self._metrics.heartbeats.inc()
        await response.write_eof()
        self._delivered()
        return response

    def _delivered(self) -> None:
        transport = self._http.transport
        if self._generation.node is not None and transport is not None and not transport.is_closing():
            self._generation.node.delivered = True

    def _refuse(self, error: CallError) -> web.Response:
        status, body = self._dialect.error(error)
        return json_response(status, body, error)

    async def _break_off(self, response: web.StreamResponse) -> web.StreamResponse:
        """Break off so that no client can take it for an end: most accept a clean one as the whole answer."""
        self._metrics.resets.inc()
        if self._dialect.broken == "end":
            await response.write_eof()
            return response
        transport = self._http.transport
        if transport is not None:
            sock = transport.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        return response
