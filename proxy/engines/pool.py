"""The servers of one model: which of them serves a call, what is tried again, and what is taken up again.

A session stays with its server while that is healthy, since the server has computed the session's beginning already. A
failure takes a server out until it answers a probe. Before the first token a call is tried again, on another server if one
is healthy; after it, the same completion goes on from the ids sampled so far.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import OrderedDict
from typing import Any

from polar.errors import EngineError
from proxy.engines.base import Interrupted, Order, Sample, Wire
from proxy.engines.resume import Joined
from proxy.engines.server import Server
from proxy.failures import CallError, unavailable

log = logging.getLogger("polar.proxy")

RETRY_WINDOW = 30.0  # weights may be swapping, or a supervisor restarting the engine
RESUME_WINDOW = 120.0  # the same after tokens came: the client waits either way, and the tokens are worth keeping
_SESSIONS = 65536


class Pool:
    def __init__(
        self,
        wire: Wire,
        urls: str | list[str],
        context_length: int,
        api_key: str | None = None,
        window: float = RETRY_WINDOW,
    ):
        self.name, self.renders = wire.name, wire.renders
        self._wire = wire
        self._window = window
        self.servers = [Server(u, wire, context_length, api_key) for u in ([urls] if isinstance(urls, str) else urls)]
        self.retries = 0
        self.resumed = 0
        self.moved = 0  # sessions that lost their server
        self._homes: OrderedDict[str, Server] = OrderedDict()
        self._largest = -1  # id sampled so far

    async def close(self) -> None:
        for server in self.servers:
            await server.close()

    def hurry(self, seconds: float) -> None:
        """What is aborted has no longer than that to end, from now on."""
        for server in self.servers:
            server.hurry(seconds)

    def state(self) -> dict[str, Any]:
        servers = [
            {"url": s.url, "up": s.up, "in_flight": s.in_flight, "sessions": s.sessions, "strikes": s.strikes}
            | ({"why": s.why} if s.why else {})
            for s in self.servers
        ]
        counts = {"retries": self.retries, "resumed": self.resumed, "moved": self.moved}
        return {"protocol": self.name, "servers": servers, **counts}

    def forget(self, session: str) -> None:
        if (home := self._homes.pop(session, None)) is not None:
            home.sessions -= 1

    async def generate(self, order: Order) -> Sample:
        self._refuse_unknown_ids(order)
        joined = Joined(order, self._wire.resumable)
        while True:
            sample = await self._piece(order, joined)
            if sample is None:
                return self._finished(order, joined.sample())
            if sample.ids:
                self._largest = max(self._largest, max(sample.ids))
            if not joined.add(sample):
                return self._finished(order, joined.sample())
            self.resumed += 1
            log.warning(
                "generation interrupted, going on",
                extra={"completion": order.rid, "sampled": len(joined.ids), "why": sample.end},
            )

    def _finished(self, order: Order, sample: Sample) -> Sample:
        """Log-probabilities under a grammar are those of another distribution than the policy's."""
        forced = order.schema is not None or (self.renders and order.tools and order.tool_choice == "required")
        if forced and not sample.untrainable:
            sample.untrainable, sample.logprobs = "constrained", []
        return sample

    async def _piece(self, order: Order, joined: Joined) -> Sample | None:
        """What one server gives, after retries. None: there will be no more of what was begun."""
        begun = time.monotonic()
        window = RESUME_WINDOW if joined.ids else self._window
        pause = 0.1
        failed: set[Server] = set()
        while not order.cancel.is_set():
            if joined.asked and order.gate is not None:  # it came through the gate before the first one
                entered = time.monotonic()
                await order.gate()
                begun += time.monotonic() - entered
                if order.cancel.is_set():
                    break
            server = self._pick(order.session, failed)
            try:
                return await server.ask(joined.ask())
            except CallError as e:
                if joined.ids:
                    log.error("generation can't go on", extra={"completion": order.rid, "why": e.code})
                    return None
                raise
            except EngineError as e:
                failed.add(server)
                if not isinstance(e, Interrupted):
                    server.failed(e.message, e.status)
                elsewhere = any(s.up and s not in failed for s in self.servers)
                late = time.monotonic() + (0 if elsewhere else pause) > begun + window
                if late or not (e.retryable or elsewhere):
                    if joined.ids:
                        return None
                    code = "engine_protocol" if e.code == "engine_protocol" else "engine_unavailable"
                    raise unavailable(f"inference engine: {e.message}", code, 5) from e
                self.retries += 1
                why = {
                    "server": server.url,
                    "status": e.status,
                    "why": e.message[:200],
                    "cause": str(e.__cause__ or "")[:200],
                }
                log.warning("engine retry", extra={"completion": order.rid, **why})
                if elsewhere:
                    continue
                failed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(order.cancel.wait(), pause * random.uniform(0.7, 1.3))
            pause = min(pause * 2, 3.0)
        return None if joined.begun else Sample()

    def _pick(self, session: str, failed: set[Server]) -> Server:
        """The session's own server; else the idlest of those that are healthy, or that at least didn't just fail."""
        if len(self.servers) == 1:
            return self.servers[0]
        home = self._homes.get(session)
        if home is not None and home.up and home not in failed:
            self._homes.move_to_end(session)
            return home
        fresh = [s for s in self.servers if s not in failed] or self.servers
        fit = [s for s in fresh if s.up] or fresh
        best = min(fit, key=lambda s: (s.in_flight, s.sessions))
        if session and best is not home:
            if home is not None:
                home.sessions -= 1
                self.moved += 1
            best.sessions += 1
            self._homes[session] = best
            self._homes.move_to_end(session)
            if len(self._homes) > _SESSIONS:
                self._homes.popitem(last=False)[1].sessions -= 1
        return best

    def _refuse_unknown_ids(self, order: Order) -> None:
        """Some engines die of an id that isn't in their vocabulary. One that was sampled is, whatever the tokenizer says."""
        if not order.vocabulary or not len(order.prompt) or self._wire.renders:
            return
        top = int(order.prompt.max())
        if (top >= order.vocabulary and top > self._largest) or int(order.prompt.min()) < 0:
            raise CallError(
                "internal",
                f"token {top} of the prompt isn't in the model's vocabulary",
                code="prompt_out_of_vocabulary",
            )
