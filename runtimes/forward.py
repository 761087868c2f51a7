"""The proxy's way into a sandbox: connections made to a listener inside are carried to the proxy by this process.

One event loop in one thread serves all sandboxes of the process. Every connection looks the proxy up anew, so its
restart breaks only what was in flight. An answer that isn't whole when the proxy's side ends reaches the agent as a reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from urllib.parse import urlsplit

from polar.errors import InvalidConfig
from polar.sandbox import ProxyEndpoint
from runtimes.answers import Answers

log = logging.getLogger("polar.forward")

PORT = 3128  # of the listener inside
INSIDE_URL = f"http://127.0.0.1:{PORT}"
MAX_CONNECTIONS = 256  # of one sandbox at a time: an agent must not use up this process's descriptors
PATIENCE = 20.0  # seconds that a connection waits for a proxy that is being restarted
_CHUNK = 1 << 16


class Forward:
    """One listener being served. `close` ends it; what it carries already goes on to its own end."""

    def __init__(self, server: Forwarder, proxy: ProxyEndpoint):
        self._server = server
        self._proxy = proxy
        self._listener: socket.socket | None = None
        self._channel: socket.socket | None = None
        self._tasks: set[asyncio.Task] = set()
        self._closed = False

    def close(self) -> None:
        self._server.run(self._close)

    def _close(self) -> None:
        self._closed = True
        for s in (self._channel, self._listener):
            if s is not None:
                self._server.loop.remove_reader(s)
                s.close()
        self._channel = self._listener = None

    def _await(self, channel: socket.socket, receive: Callable[[socket.socket], socket.socket | None]) -> None:
        """Serve the listener that will come through `channel`."""
        channel.setblocking(False)
        self._channel = channel
        self._server.loop.add_reader(channel, self._arrived, receive)

    def _arrived(self, receive: Callable[[socket.socket], socket.socket | None]) -> None:
        channel, self._channel = self._channel, None
        assert channel is not None
        self._server.loop.remove_reader(channel)
        listener = receive(channel)
        channel.close()
        if listener is not None and not self._closed:
            self._serve(listener)

    def _serve(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._server.loop.add_reader(listener, self._accept)

    def _accept(self) -> None:
        assert self._listener is not None
        for _ in range(64):
            try:
                client, _addr = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as e:  # no descriptors left, or the namespace is going away
                log.warning("can't accept from a sandbox: %s", e)
                self._server.loop.remove_reader(self._listener)
                if not self._closed:
                    self._server.loop.call_later(0.2, self._resume)
                return
            if len(self._tasks) >= MAX_CONNECTIONS:
                client.close()
                continue
            client.setblocking(False)
            task = self._server.loop.create_task(self._carry(client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _resume(self) -> None:
        if self._listener is not None:
            self._server.loop.add_reader(self._listener, self._accept)

    async def _carry(self, client: socket.socket) -> None:
        writers: list[asyncio.StreamWriter] = []
        try:
            down_r, down_w = await asyncio.open_connection(sock=client)
            writers.append(down_w)
            up = await self._connect()
            if up is None:
                return
            up_r, up_w = up
            writers.append(up_w)
            await _both_ways(down_r, down_w, up_r, up_w)
        except OSError as e:
            # A broken call must look broken: a clean end would pass for a complete answer.
            log.debug("a sandbox's connection broke: %s", e)
            with contextlib.suppress(OSError):  # closed already, if it was the client that broke
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for w in writers:
                w.transport.abort()
        finally:
            for w in writers:
                w.close()
            if not writers:
                client.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        deadline, pause = time.monotonic() + PATIENCE, 0.02
        while True:
            try:
                return await open_proxy(self._proxy)
            except OSError as e:
                if time.monotonic() > deadline or self._closed:
                    log.warning("the proxy can't be reached: %s", e)
                    return None
            await asyncio.sleep(pause)
            pause = min(0.5, pause * 2)


async def open_proxy(proxy: ProxyEndpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if proxy.socket:
        return await asyncio.open_unix_connection(proxy.socket)
    host, port = address(proxy)
    return await asyncio.open_connection(host, port)


def address(proxy: ProxyEndpoint) -> tuple[str, int]:
    url = urlsplit(proxy.url)
    if url.scheme != "http" or not url.hostname:
        raise InvalidConfig(f"proxy_url: '{proxy.url}' is not http://host:port")
    return url.hostname, url.port or 80


async def _both_ways(
    down_r: asyncio.StreamReader, down_w: asyncio.StreamWriter, up_r: asyncio.StreamReader, up_w: asyncio.StreamWriter
) -> None:
    """Until the answer has ended. The request's half may end before; if it breaks, the proxy must see it at once.
    OSError: it broke, or the proxy ended within an answer."""
    answers = Answers()
    request = asyncio.create_task(_pump(down_r, up_w, answers.asked))
    answer = asyncio.create_task(_pump(up_r, down_w, answers.feed, answers.whole))
    try:
        await asyncio.wait((request, answer), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            request.result()
        await answer
    finally:
        request.cancel()
        answer.cancel()
        await asyncio.gather(request, answer, return_exceptions=True)


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    seen: Callable[[bytes], None],
    may_end: Callable[[], bool] = lambda: True,
) -> None:
    while data := await reader.read(_CHUNK):
        seen(data)
        writer.write(data)
        await writer.drain()
    if not may_end():
        raise ConnectionResetError("the proxy ended within an answer")
    if writer.can_write_eof():
        writer.write_eof()


class Forwarder:
    """The loop and its thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="polar-forward", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def run(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop and wait for it."""
        done = threading.Event()

        def step() -> None:
            try:
                call()
            finally:
                done.set()

        self.loop.call_soon_threadsafe(step)
        done.wait(10)

    def serve(self, listener: socket.socket, proxy: ProxyEndpoint) -> Forward:
        """Carry what `listener` gets to `proxy`."""
        forward = Forward(self, proxy)
        self.run(lambda: forward._serve(listener))
        return forward

    def serve_from(
        self,
        channel: socket.socket,
        receive: Callable[[socket.socket], socket.socket | None],
        proxy: ProxyEndpoint,
    ) -> Forward:
        """The same for a listener that a sandboxed process will hand over through `channel`."""
        forward = Forward(self, proxy)
        self.run(lambda: forward._await(channel, receive))
        return forward


_lock = threading.Lock()
_forwarder: tuple[int, Forwarder] | None = None


def forwarder() -> Forwarder:
    """This process's forwarder. A forked child has no thread of its parent's, so it gets its own."""
    global _forwarder
    with _lock:
        if _forwarder is None or _forwarder[0] != os.getpid():
            _forwarder = (os.getpid(), Forwarder())
        return _forwarder[1]
