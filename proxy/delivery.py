"""Bringing a generation to its client: as a stream or whole, and knowing whether it arrived."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
import time
from collections.abc import Awaitable

from aiohttp import web

from proxy.dialects.base import Answer, Dialect, Encoder, Parting
from proxy.failures import CallError, unavailable
from proxy.generation import Generation
from proxy.metrics import Metrics
from proxy.neutral import Finish, Request

log = logging.getLogger("polar.proxy")

# Headers go out when the engine has the request: until then a failure is still a status. Later than this they go anyway.
HEADERS_WITHIN = 5.0
# A client that takes nothing for so long, with the buffers between it and us full, is as good as gone.
STALLED = 120.0


def json_response(status: int, body: bytes, error: CallError | None = None) -> web.Response:
    headers = {"Content-Type": "application/json"}
    if error is not None and error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    if error is not None and error.kind in ("unauthorized", "gone", "limit"):
        headers["x-should-retry"] = "false"  # Claude Code would ask for minutes, the official SDKs read it, too
    return web.Response(status=status, body=body, headers=headers)


class Delivery:
    """One client of a generation that it already listens to."""

    def __init__(
        self, http: web.BaseRequest, dialect: Dialect, generation: Generation, request: Request, metrics: Metrics
    ):
        self._http, self._dialect, self._generation, self._request = http, dialect, generation, request
        self._metrics = metrics

    async def run(self, heartbeat: float) -> web.StreamResponse:
        """Answer the client. Being cancelled (it went away) leaves the generation."""
        g = self._generation
        try:
            if self._request.stream:
                with self._metrics.streams.track_inprogress():
                    return await self._stream(heartbeat)
            return await self._whole()
        finally:
            g.leave()

    def _answer(self) -> Answer:
        g = self._generation
        model = self._request.model or g.served.key
        return Answer(
            id=g.id,
            model=model,
            created=int(g.created),
            request=self._request,
            prompt_tokens=g.prompt_tokens,
            context_length=g.served.row.context_length,
        )

    async def _whole(self) -> web.StreamResponse:
        g = self._generation
        while not g.done:
            await g.change(len(g.events), 3600.0)
        if g.error is not None:
            return self._refuse(g.error)
        response = json_response(200, self._dialect.whole(self._answer(), g.events))
        await response.prepare(self._http)
        await self._write(response.write_eof())
        self._delivered()
        return response

    async def _stream(self, heartbeat: float) -> web.StreamResponse:
        g = self._generation
        due = time.monotonic() + HEADERS_WITHIN
        while not (g.done or g.accepted or g.events) and (left := due - time.monotonic()) > 0:
            await g.change(0, left)
        if g.error is not None:
            return self._refuse(g.error)
        encoder = self._dialect.encoder(self._answer())
        response = web.StreamResponse(headers=encoder.headers)
        # Reverse proxies and the sandbox's relay must not collect the stream.
        response.headers["X-Accel-Buffering"] = "no"
        data, seen = encoder.start(), 0
        if g.events and not g.rewritten and not isinstance(g.events[-1], Finish):
            seen = len(g.events)
            data += b"".join(encoder.event(e) for e in g.events)
        response._send_headers_immediately = not data  # else they go out with it, in one packet
        await response.prepare(self._http)
        await self._write(response.write(data))
        due = time.monotonic() + heartbeat
        while True:
            # What is rewritten is ready when it is done.
            await g.change(len(g.events) if g.rewritten else seen, max(0.0, due - time.monotonic()))
            if g.rewritten and seen:
                return await self._break_off(response, encoder)
            new = [] if g.rewritten and not g.done else g.events[seen:]
            if not new and g.done:
                return await self._break_off(response, encoder)
            seen += len(new)
            data = b"".join(encoder.event(e) for e in new)
            if new and isinstance(new[-1], Finish):
                break
            if not data and time.monotonic() >= due:  # some events are nothing to the client
                data = encoder.heartbeat()
                self._metrics.heartbeats.inc()
            if data:
                await self._write(response.write(data))
                due = time.monotonic() + heartbeat
        await self._write(response.write_eof(data))
        self._delivered()
        return response

    async def _write(self, writing: Awaitable[None]) -> None:
        """Write, unless the client doesn't read: then it is dropped, as if it had gone away."""
        try:
            async with asyncio.timeout(STALLED):
                await writing
        except TimeoutError as e:
            self._metrics.stalled.inc()
            if self._http.transport is not None:
                self._http.transport.abort()
            raise ConnectionResetError("the client doesn't read") from e

    def _delivered(self) -> None:
        transport = self._http.transport
        if self._generation.node is not None and transport is not None and not transport.is_closing():
            self._generation.delivered()

    def _refuse(self, error: CallError) -> web.Response:
        status, body = self._dialect.error(error)
        return json_response(status, body, error)

    async def _break_off(self, response: web.StreamResponse, encoder: Encoder) -> web.StreamResponse:
        """Break off so that no client can take it for an end: most accept a clean one as the whole answer. A Unix socket
        knows no reset; the sandbox's relay makes one of an answer without its last chunk."""
        self._metrics.resets.inc()
        if self._dialect.broken == "end":
            _, error = self._dialect.error(self._generation.error or unavailable("the answer broke off", "broken_off"))
            await self._write(response.write_eof(encoder.broken(error) if isinstance(encoder, Parting) else b""))
            return response
        transport = self._http.transport
        if transport is not None:
            sock = transport.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        return response
