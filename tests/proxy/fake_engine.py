"""A scripted engine that speaks SGLang's /generate: what it "samples" is given, how it sends it is random."""

from __future__ import annotations

import asyncio
import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """One scripted sample. `hold_after`: wait there until `release`, an abort, or a disconnect. `drop_after`: break the
    connection there. `abort_after`: end there as an engine does whose weights are changed. `status`: refuse with it.
    `error`: refuse inside the stream."""

    ids: list[int] = field(default_factory=list)
    end: str = "stop"
    matched: int | str | None = None
    hold_after: int | None = None
    drop_after: int | None = None
    abort_after: int | None = None
    status: int = 200
    error: dict[str, Any] | None = None
    delay: float = 0.0  # seconds per chunk
    versions: list[dict] | None = None
    spoil: Callable[[dict], None] | None = None  # changes every chunk
    release: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class Served:
    body: dict[str, Any]
    sent: int = 0  # tokens sampled
    aborted: bool = False
    finished: bool = False


class FakeEngine:
    def __init__(self, *, incremental: bool = False, seed: int = 0):
        self.replies: deque[Reply] = deque()
        self.default: Callable[[dict], Reply] | None = None
        self.served: list[Served] = []
        self.refused = 0
        self.aborts: list[str] = []
        self.incremental = incremental
        self.version = "v1"
        self.changed = asyncio.Event()
        self._random = random.Random(seed)
        self._aborted: dict[str, asyncio.Event] = {}
        self._runner: web.AppRunner | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def sampled(self) -> int:
        return sum(s.sent for s in self.served)

    async def start(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, condition: Callable[[], bool], timeout: float = 10.0) -> None:
        """Wait for a condition over what the engine saw."""
        async with asyncio.timeout(timeout):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def _abort(self, http: web.Request) -> web.Response:
        rid = (await http.json())["rid"]
        self.aborts.append(rid)
        if rid in self._aborted:
            self._aborted[rid].set()
        self.changed.set()
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        reply = self.replies.popleft() if self.replies else self.default(body) if self.default else Reply(status=500)
        if reply.status != 200:
            self.refused += 1
            self.changed.set()
            return web.json_response({"error": reply.error or {"message": "scripted"}}, status=reply.status)
        served = Served(body)
        self.served.append(served)
        self.changed.set()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        if reply.error is not None:
            await response.write(f"data: {json.dumps({'error': reply.error})}\n\ndata: [DONE]\n\n".encode())
            return response
        try:
            await self._stream(http, response, reply, served)
        finally:
            self.changed.set()
        return response

    async def _stream(self, http: web.Request, out: web.StreamResponse, reply: Reply, served: Served) -> None:
        abort = self._aborted.setdefault(served.body["rid"], asyncio.Event())
        limit = served.body["sampling_params"]["max_new_tokens"]
        ids, end = reply.ids[:limit], reply.end if len(reply.ids) <= limit else "length"
        at = 0
        while at < len(ids):
            if reply.drop_after is not None and at >= reply.drop_after:
                assert http.transport is not None
                http.transport.abort()
                return
            if reply.hold_after is not None and at >= reply.hold_after:
                waits = [asyncio.ensure_future(e.wait()) for e in (reply.release, abort)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for w in waits:
                    w.cancel()
            if abort.is_set() or (reply.abort_after is not None and at >= reply.abort_after):
                end = "abort"
                break
            step = self._random.randint(1, 4)
            for bound in (reply.hold_after, reply.drop_after, reply.abort_after):
                if bound is not None and at < bound:
                    step = min(step, bound - at)
            new_at = min(at + step, len(ids))
            served.sent = new_at
            last = new_at == len(ids)
            await out.write(self._chunk(reply, served, ids, at, new_at, end if last else None))
            self.changed.set()
            at = new_at
            if reply.delay:
                await asyncio.sleep(reply.delay)
        if end == "abort":
            await out.write(self._chunk(reply, served, ids, at, at, "abort"))
        served.aborted, served.finished = end == "abort", True
        await out.write(b"data: [DONE]\n\n")

    def _chunk(self, reply: Reply, served: Served, ids: list[int], old: int, new: int, end: str | None) -> bytes:
        start = old if self.incremental else 0
        logprobs = [[logprob(i, t), t, None] for i, t in enumerate(ids[:new])]
        finish: dict[str, Any] | None = None
        if end is not None:
            finish = {"type": end}
            if end == "stop":
                finish["matched"] = reply.matched if reply.matched is not None else ids[-1]
        meta: dict[str, Any] = {
            "id": served.body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(served.body["input_ids"]),
            "completion_tokens": new,
            "cached_tokens": 3,
            "weight_version": self.version,
            "output_token_logprobs": logprobs[start:],
        }
        if end is not None:
            meta["weight_versions"] = reply.versions or [{"version": self.version, "start": 0, "end": new}]
        chunk = {"text": "", "output_ids": ids[start:new], "meta_info": meta}
        if reply.spoil is not None:
            reply.spoil(chunk)
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def logprob(position: int, token: int) -> float:
    return -((position * 7 + token) % 31 + 1) / 32.0
