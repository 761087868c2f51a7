"""An HTTP client that costs next to nothing, so that what is measured is the server: raw sockets, one call at a time on each,
bodies that are put together before the clock starts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

from msgspec import Struct

STREAM_END = b"0\r\n\r\n"
TIMEOUT = 120.0


class Answer(Struct):
    """Times in seconds: to the first byte of the body and to the end. `ok`: 200, and a stream that ended as it must."""

    ok: bool
    first: float
    whole: float
    said: str = ""  # the beginning of what was not ok


class Wire(asyncio.Protocol):
    """One kept-alive connection."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._ended: asyncio.Future[None] | None = None
        self._reset()

    def _reset(self) -> None:
        self._head = b""
        self._tail = b""
        self._begun = self._first = 0.0
        self._left: int | None = None  # bytes of a body with a known length

    def connection_made(self, transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._first:
            self._head += data
            if (at := self._head.find(b"\r\n\r\n")) < 0:
                return
            head, data = self._head[:at].lower(), self._head[at + 4 :]
            self._head = self._head[: at + 4]
            if (length := head.find(b"content-length:")) >= 0:
                self._left = int(head[length + 15 :].split(b"\r\n", 1)[0])
            self._first = time.perf_counter() if data or self._left == 0 else 0.0
            if not self._first and self._left is None:
                self._first = time.perf_counter()
        self._tail = (self._tail + data)[-400:]
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self._end()
        elif self._tail.endswith(STREAM_END):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    @property
    def alive(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    async def call(self, head: bytes, *body: bytes) -> Answer:
        assert self._transport is not None
        self._reset()
        self._ended = asyncio.get_running_loop().create_future()
        begun = time.perf_counter()
        self._transport.writelines([head, *body])
        try:
            await asyncio.wait_for(self._ended, TIMEOUT)
        except TimeoutError:
            self.close()
        end = time.perf_counter()
        ok = self._head.startswith(b"HTTP/1.1 200") and b"data: [DONE]\n\n" in self._tail and self.alive
        said = "" if ok else (self._head + self._tail).decode("utf-8", "replace")[-300:]
        return Answer(ok, (self._first or end) - begun, end - begun, said)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Target:
    """One server: as many connections as calls are in flight."""

    def __init__(self, url: str, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None):
        parts = urlsplit(url)
        self._host, self._port, self._prefix = parts.hostname or "", parts.port or 80, parts.path
        self._path = path
        self._headers = "".join(f"{k}: {v}\r\n" for k, v in (headers or {}).items())
        self._idle: list[Wire] = []

    async def send(self, body: list[bytes], prefix: str = "") -> Answer:
        size = sum(map(len, body))
        head = (
            f"POST {self._prefix}{prefix}{self._path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            f"{self._headers}Content-Length: {size}\r\n\r\n"
        ).encode()
        wire = await self._wire()
        answer = await wire.call(head, *body)
        if wire.alive:
            self._idle.append(wire)
        return answer

    async def _wire(self) -> Wire:
        while self._idle:
            wire = self._idle.pop()
            if wire.alive:
                return wire
        loop = asyncio.get_running_loop()
        for _ in range(5):
            with contextlib.suppress(OSError):
                return (await loop.create_connection(Wire, self._host, self._port))[1]
            await asyncio.sleep(0.2)
        return (await loop.create_connection(Wire, self._host, self._port))[1]

    def close(self) -> None:
        for wire in self._idle:
            wire.close()
