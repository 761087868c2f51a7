"""The proxy without HTTP: capabilities in, generations out, and the background work around them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from polar.codec import pack
from polar.config import Settings
from polar.ids import new_id
from polar.store.capture import AsyncCapture, Grant
from polar.store.connection import connect_async
from polar.store.keys import Keys
from proxy.attempt import Attempts
from proxy.engines.report import EngineCollector
from proxy.failures import bad, gone, unavailable
from proxy.gate import Gate, Limits
from proxy.generation import Generation
from proxy.linking import request_hash
from proxy.metrics import Metrics
from proxy.neutral import Request
from proxy.pausing import Pauses
from proxy.recall import Recall
from proxy.store import ERRORS, Store
from proxy.table import Table

log = logging.getLogger("polar.proxy")

BEAT_SECONDS = 3.0


class Service:
    def __init__(self, settings: Settings, limits: Limits | None = None):
        self.settings = settings
        self.id = new_id("proxy")
        self.table = Table(settings)
        self.attempts = Attempts()
        self.metrics = Metrics()
        self.gate = Gate(limits or Limits(), self.metrics)
        self.pauses = Pauses(list(settings.models))
        self.metrics.registry.register(EngineCollector(self.table.engines, self.pauses))
        self.draining = False
        self._stopped = False
        self._tasks: list[asyncio.Task] = []
        self._running: dict[asyncio.Task, Generation] = {}

    async def start(self) -> None:
        """Load the models, then begin the background work. Redis may come later."""
        await self.table.open()
        # The client's own retries would run a script twice whose answer was lost; Store knows which may be repeated.
        self._redis = connect_async(self.settings.store_url, retry=Retry(NoBackoff(), 0))
        self._capture = AsyncCapture(self._redis, Keys(self.settings.namespace), self.id)
        self.store = Store(self._capture, retried=self.metrics.store_retries.inc)
        self.recall = Recall(self._capture, self.store, self.attempts)
        await self._quietly(self._capture.beat)
        work = (self._beat(), self._revocations(), self.metrics.watch_loop())
        self._tasks = [asyncio.create_task(w) for w in work]

    async def stop(self, seconds: float) -> None:
        """Abort what is in flight, store what was sampled of it, let go of everything: in so many seconds, whatever the
        engines and the store do. What is lost by that is logged."""
        self.draining = True
        begun = time.monotonic()

        def left(share: float) -> float:
            return max(0.0, begun + share * seconds - time.monotonic())

        for generation in self._running.values():
            generation.cancel("the proxy is shutting down")
            generation.served.engine.hurry(seconds / 3)
        self.pauses.close()
        if self._running:
            await asyncio.wait(set(self._running), timeout=left(0.8))
        self._tell_lost(await self.store.flush(left(0.8)))
        self._stopped = True
        loops = set(self._tasks)
        while loops and left(0.9):  # a client library may swallow a cancellation; the loops end at the flag then
            for t in loops:
                t.cancel()
            _, loops = await asyncio.wait(loops, timeout=min(0.2, left(0.9)))
        await self._briefly(self._goodbye, left(0.95))
        await self.table.close()
        await self._briefly(self._redis.aclose, left(1.0))

    async def _goodbye(self) -> None:
        await self.store.tell_delivered()
        # Another proxy that has this one's calls now needn't ask for what it delivered.
        await self._redis.hdel(self._capture.keys.proxies, self.id)

    def _tell_lost(self, writes: int) -> None:
        for generation in self._running.values():
            if generation.accepted:  # else nothing was sampled
                ids = {"session": generation.grant.session_id, "completion": generation.id}
                log.error("completion lost", extra={**ids, "why": "the proxy had to stop"})
        if writes:
            log.error("stopped before the store took everything", extra={"writes": writes})

    async def redis_up(self) -> bool:
        try:
            return bool(await self._redis.ping())
        except ERRORS:
            return False

    async def generate(self, grant: Grant, request: Request, dialect: str) -> Generation:
        """The generation that answers the request, begun or joined; the caller listens to it already."""
        attempt = self.attempts.get(grant.attempt_id)
        if self.draining:
            error = unavailable("the proxy is shutting down", "proxy_stopping")
            await self.store.note(grant, error, attempt)  # an agent that gives up over it isn't to blame
            raise error
        _refuse_unstorable(request)
        if attempt.closed:
            raise gone()
        same = request_hash(dialect, request)
        request.identity = b""  # as long as the body
        flying = attempt.generations.get(same)
        if flying is not None and not flying.cancelled:
            flying.listen()
            log.info("joined", extra={"session": grant.session_id, "completion": flying.id})
            self.metrics.repeats.labels("joined").inc()
            try:
                await self.store.check_open(grant)
            except BaseException:
                flying.leave()
                raise
            return flying
        served = self.table.pick(request.model, grant.model)
        if request.images and served.row.images == "refuse":
            raise bad("this model reads text only: the request has an image", "messages", "unsupported_content")
        generation = Generation(self, grant, served, attempt, request, dialect, same)
        generation.after = flying
        generation.listen()
        attempt.generations[generation.request_hash] = generation
        task = asyncio.create_task(generation.run())
        self._running[task] = generation
        self.metrics.generating.set(len(self._running))
        task.add_done_callback(self._finished)
        return generation

    async def count(self, grant: Grant, request: Request) -> int:
        """Tokens of the request's prompt, rendered in full; of one that is much too long, how many it has at least."""
        await self.store.check_open(grant)
        served = self.table.pick(request.model, grant.model)
        if least := served.hopeless(request.messages):
            return least
        ids: np.ndarray = await served.codec.render(request.messages, request.tools)
        return len(ids)

    def _finished(self, task: asyncio.Task) -> None:
        del self._running[task]
        self.metrics.generating.set(len(self._running))

    def revoke(self, attempt_id: str) -> None:
        self.table.forget(attempt_id)
        attempt = self.attempts.peek(attempt_id)
        if attempt is None:
            return
        attempt.closed = True
        for generation in list(attempt.generations.values()):
            generation.cancel("the session has ended")
        self.attempts.drop(attempt_id)

    async def _beat(self) -> None:
        while not self._stopped:
            await self._quietly(self._capture.beat)
            await self._quietly(self.store.tell_delivered)
            await asyncio.sleep(BEAT_SECONDS)

    async def _revocations(self) -> None:
        """Follow the stream of ended attempts. Its place is kept over lost connections, so none is missed."""
        after = ""
        while not self._stopped:
            try:
                if not after:
                    # `$` would mean another "now" with every call, and miss what came between two of them.
                    last: Any = await self._redis.xrevrange(self._capture.keys.revoked, count=1)
                    after = last[0][0].decode() if last else "0-0"
                after, ended = await self._capture.revocations(after)
                for attempt_id in ended:
                    self.revoke(attempt_id)
            except Exception as e:  # if this loop ended, ended sessions would go on
                log.warning("revocations interrupted", extra={"why": type(e).__name__})
                await asyncio.sleep(0.5)

    async def _quietly(self, work: Callable[[], Awaitable[Any]]) -> None:
        try:
            await work()
        except Exception as e:  # a proxy whose heart stops is taken for dead
            log.warning("store not reachable", extra={"why": type(e).__name__})

    async def _briefly(self, work: Callable[[], Awaitable[Any]], seconds: float) -> None:
        """The same, and given up after a while: a store may hang."""
        task = asyncio.create_task(self._quietly(work))
        if not (await asyncio.wait({task}, timeout=seconds))[0]:
            task.cancel()


def _refuse_unstorable(request: Request) -> None:
    """What can't be captured must not be sampled. Everything else in a request is plain text."""
    for name, value in (("tools", request.tools), ("sampling", request.wishes)):
        try:
            pack(value)
        except Exception as e:
            raise bad(f"'{name}' has a value that can't be stored: {e}"[:200], name) from e
