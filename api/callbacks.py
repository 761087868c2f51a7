"""Finished tasks whose owner asked to be called: delivered at least once, over restarts of this service.

A task's name waits in a stream until its body was accepted or given up; what a dead service had begun, the next one takes
over. What is given up stays in a bounded list with the reason.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import aiohttp
import redis

from api.compat_results import task_result
from api.control import Control
from polar.codec import to_json
from polar.errors import NotFound, PolarError

log = logging.getLogger("polar.callbacks")

GROUP = "api"
TIMEOUT_SECONDS = 10.0
# Answers worth another try; every other refusal is final.
AGAIN = {408, 425, 429}
DEAD_KEPT = 1000


class Refused(Exception):
    """The receiver will never take it."""


class Callbacks:
    def __init__(self, c: Control, *, tries: int = 8, backoff: float = 1.0, takeover: float = 60.0, at_once: int = 16):
        self.c = c
        self.name = f"{socket.gethostname()}-{os.getpid()}"
        self.tries, self.backoff, self.takeover = tries, backoff, takeover
        self.stopping = False
        self.dead = c.keys.callbacks + ":dead"
        self._slots = asyncio.Semaphore(at_once)
        self._busy: dict[bytes, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Until cancelled, or `stopping`."""
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            try:
                while not self.stopping:
                    try:
                        await self._round(http)
                    except (redis.RedisError, OSError) as e:
                        await self._recover(e)
            finally:
                for task in self._busy.values():
                    task.cancel()
                await asyncio.gather(*self._busy.values(), return_exceptions=True)

    async def _recover(self, e: Exception) -> None:
        try:
            if "NOGROUP" in str(e):
                await self._join()
                return
        except (redis.RedisError, OSError) as again:
            e = again
        log.warning("callbacks wait for Redis: %s: %s", type(e).__name__, e)
        await asyncio.sleep(1)

    async def _join(self) -> None:
        try:
            await self.c.redis.xgroup_create(self.c.keys.callbacks, GROUP, id="0", mkstream=True)
        except redis.ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise

    async def _round(self, http: aiohttp.ClientSession) -> None:
        stream = self.c.keys.callbacks
        idle = int(self.takeover * 1000)
        _, left, *_ = await self.c.redis.xautoclaim(stream, GROUP, self.name, idle, "0-0", count=50)
        wait = int(min(2.0, self.takeover / 2) * 1000)
        new = await self.c.redis.xreadgroup(GROUP, self.name, {stream: ">"}, count=50, block=wait)
        for entry, fields in left + (new[0][1] if new else []):
            if entry is None or entry in self._busy:
                continue
            await self._slots.acquire()
            task = asyncio.create_task(self._deliver(http, entry, (fields or {}).get(b"task", b"").decode()))
            self._busy[entry] = task
            task.add_done_callback(partial(self._done, entry))

    def _done(self, entry: bytes, _: asyncio.Task[None]) -> None:
        self._busy.pop(entry, None)
        self._slots.release()

    async def _deliver(self, http: aiohttp.ClientSession, entry: bytes, task: str) -> None:
        try:
            reason = await self._attempts(http, entry, task)
            if reason:
                log.error("callback of task %s is given up: %s", task, reason)
            await self._finish(entry, task, reason)
        except redis.RedisError as e:
            log.warning("callback of task %s stays pending: %s", task, e)
        except Exception:
            log.exception("callback of task %s stays pending", task)

    async def _attempts(self, http: aiohttp.ClientSession, entry: bytes, task: str) -> str:
        """ "" when it was accepted, else why it is given up."""
        reason = ""
        for n in range(self.tries):
            if n:
                await self._pause(entry, min(60.0, self.backoff * 2 ** (n - 1)))
            try:
                url, body = await self.c.call(self._body, task)
                if not url:
                    return ""
                await self._post(http, url, body)
                return ""
            except (Refused, NotFound) as e:
                return str(e)
            except (aiohttp.ClientError, TimeoutError, OSError, PolarError) as e:
                reason = f"{type(e).__name__}: {e}"
                log.warning("callback of task %s, try %d of %d: %s", task, n + 1, self.tries, reason)
        return reason

    def _body(self, task: str) -> tuple[str, bytes]:
        url = self.c.store.task(task).callback_url
        return (url, to_json(task_result(self.c, task))) if url else ("", b"")

    async def _post(self, http: aiohttp.ClientSession, url: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        # A redirect could lead a result to another place or scheme than the one that was submitted.
        async with http.post(url, data=body, headers=headers, allow_redirects=False) as reply:
            if reply.status < 300:
                return
            if reply.status >= 500 or reply.status in AGAIN:
                raise aiohttp.ClientError(f"the receiver answered {reply.status}")
            raise Refused(f"the receiver answered {reply.status}")

    async def _pause(self, entry: bytes, seconds: float) -> None:
        """Wait, and stay the owner meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self.takeover / 3))
            await self.c.redis.xclaim(self.c.keys.callbacks, GROUP, self.name, 0, [entry], justid=True)

    async def _finish(self, entry: bytes, task: str, reason: str) -> None:
        pipe = self.c.redis.pipeline(transaction=True)
        if reason:
            pipe.lpush(self.dead, json.dumps({"task": task, "reason": reason[:500], "at": time.time()}))
            pipe.ltrim(self.dead, 0, DEAD_KEPT - 1)
        pipe.xack(self.c.keys.callbacks, GROUP, entry)
        pipe.xdel(self.c.keys.callbacks, entry)
        await pipe.execute()


@asynccontextmanager
async def serving(c: Control, **options: Any) -> AsyncIterator[None]:
    """Deliver while the context is open."""
    callbacks = Callbacks(c, **options)
    running = asyncio.create_task(callbacks.run(), name="callbacks")
    try:
        yield
    finally:
        callbacks.stopping = True
        while not running.done():  # a client library may take a cancellation for a lost connection
            running.cancel()
            await asyncio.wait([running], timeout=0.5)
