"""One inference server: a request to it, an abort, and how it fares."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import aiohttp

from polar.errors import EngineError
from proxy import logs
from proxy.engines.base import Ask, Interrupted, Malformed, Reader, Sample, Wire
from proxy.engines.lines import Events, TooLong
from proxy.failures import CallError, bad, overflow

log = logging.getLogger("polar.proxy")

SLOW_ACCEPT = 5.0  # a request that was sent and not answered for so long counts as accepted: the engine is just busy
DRAIN = 15.0  # how long an aborted generation may take to end
PROBE_EVERY = (0.25, 15.0)  # seconds between probes of a server that is out: at first, at most
_TOO_LONG = re.compile(r"longer than the model's context|maximum (allowed|context|model) length|context length", re.I)
_BUSY = (408, 425, 429)


class Server:
    """`up` is false from a failure until a probe or a request succeeds; `strikes` are the failures since the last success."""

    def __init__(self, url: str, wire: Wire, context_length: int, api_key: str | None):
        self.url = url.rstrip("/")
        self.in_flight = 0
        self.sessions = 0  # that have their home here
        self.up = True
        self.strikes = 0
        self.why = ""
        self._wire, self._context = wire, context_length
        self._plain = False  # it refused what not every server knows
        self._prober: asyncio.Task | None = None
        self._aborts: set[asyncio.Task] = set()
        self._ending: set[_Limit] = set()  # of requests that are aborted
        self._drain = DRAIN
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_sent)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            headers=headers,
            trace_configs=[trace],
            auto_decompress=False,
        )

    async def close(self) -> None:
        tasks = [*self._aborts, *([self._prober] if self._prober else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.close()

    def hurry(self, seconds: float) -> None:
        """Give what is aborted, by now or later, no longer than that to end."""
        self._drain = min(self._drain, seconds)
        for limit in self._ending:
            limit.within(seconds)

    # Asking ----------------------------------------------------------------------------------------------------------

    async def ask(self, ask: Ask) -> Sample:
        """One request. Raises EngineError or CallError while nothing was sampled; afterwards the sample says how it ended."""
        limit = _Limit()
        aborter = asyncio.create_task(self._abort_on(ask, limit))
        with self._counted():
            try:
                sample = await self._once(ask, limit)
            finally:
                aborter.cancel()
                self._ending.discard(limit)
        if sample.end == "failed":
            self.failed("a stream broke off")
        else:
            self.works()
        return sample

    async def _once(self, ask: Ask, limit: _Limit) -> Sample:
        reader, cancel = self._wire.reader(ask), ask.order.cancel
        try:
            # Not limited until it is aborted: then the engine gets a while to end the stream by itself.
            async with limit.running():
                await self._request(ask, reader, limit)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            if not reader.begun and not cancel.is_set():
                # Its text names the server, which is none of a sandbox's business.
                raise EngineError(type(e).__name__) from e
        except TooLong as e:
            reader.fault = str(e)
        if not reader.begun and not cancel.is_set():
            if reader.error is not None:
                raise self._refusal(_status(reader.error), json.dumps(reader.error).encode(), ask)
            if reader.fault:
                raise Malformed(f"a malformed answer: {reader.fault}", retryable=False)
            if reader.done:
                raise Interrupted("the stream ended without a token")
            raise EngineError("the stream ended without a token")
        if not reader.begun:
            return Sample()
        if reader.fault:
            log.error("engine answer malformed", extra={"completion": ask.rid, "why": reader.fault})
        sample = reader.sample()
        if sample.end == "failed" and cancel.is_set():
            sample.end = "abort"
        return sample

    async def _request(self, ask: Ask, reader: Reader, limit: _Limit) -> None:
        timer: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()

        def sent() -> None:
            timer.append(loop.call_later(SLOW_ACCEPT, ask.order.accepted))

        headers, plain = {"Content-Type": "application/json"}, self._plain
        try:
            while True:
                context = SimpleNamespace(sent=sent)
                async with self._http.post(
                    self.url + self._wire.path,
                    data=self._wire.body(ask, plain),
                    headers=headers,
                    trace_request_ctx=context,
                ) as response:
                    if response.status == 200:
                        self._plain = plain
                        ask.order.accepted()
                        await self._read(response, ask, reader, limit)
                        return
                    refusal = self._refusal(response.status, await response.content.read(65536), ask)
                if plain or not self._wire.extras or response.status not in (400, 422) or _too_long(refusal):
                    raise refusal
                plain = True
        finally:
            for t in timer:
                t.cancel()

    async def _read(self, response: aiohttp.ClientResponse, ask: Ask, reader: Reader, limit: _Limit) -> None:
        events = Events()
        ended = False
        while data := await response.content.readany():
            new = reader.read(events.push(data))
            if new and ask.tokens(new):
                self._abort_later(ask.rid)
                return  # leaving the response closes the connection
            if reader.fault:
                self._abort_later(ask.rid)
                return
            if reader.done and not ended:
                ended = True
                limit.within(1.0, keep=False)  # only the body's end is left, which makes the connection reusable

    def _refusal(self, status: int, body: bytes, ask: Ask) -> Exception:
        text = body.decode("utf-8", "replace")[:2000]
        # Engines quote the prompt, or what they made of it: no message or log line of ours repeats that.
        logs.prompts.info("engine refused", extra={"completion": ask.rid, "status": status, "text": text})
        if 400 <= status < 500 and _TOO_LONG.search(text):
            return overflow(len(ask.prompt), self._context)
        if status >= 500 or status in _BUSY or status == 0:
            return EngineError(f"answered {status}", status=status)
        if status in (400, 422) and ask.order.schema is not None:
            return bad(
                "the inference engine can't constrain its answer to this format: " + _said(text),
                "response_format",
                "unsupported_response_format",
            )
        log.error("engine refused", extra={"completion": ask.rid, "status": status})
        if status in (400, 422) and self._wire.renders:
            return bad(f"the inference server refused the request: {_said(text)}")
        return CallError("internal", f"the inference engine refused the request ({status})", code="engine_refused")

    # Aborting --------------------------------------------------------------------------------------------------------

    async def _abort_on(self, ask: Ask, limit: _Limit) -> None:
        """Abort upstream when cancelled; again each second, since an abort that overtakes its request is lost."""
        await ask.order.cancel.wait()
        self._ending.add(limit)
        limit.within(self._drain)
        while await self._abort(ask.rid):
            await asyncio.sleep(1.0)
        limit.within(0.0)  # nothing but the end of the connection tells this server

    async def _abort(self, rid: str) -> bool:
        """False if the server knows no such call."""
        call = self._wire.abort(rid)
        if call is None:
            return False
        path, body = call
        try:
            timeout, headers = aiohttp.ClientTimeout(total=5), {"Content-Type": "application/json"}
            async with self._http.post(self.url + path, data=body, headers=headers, timeout=timeout) as response:
                return response.status not in (403, 404, 405)
        except (aiohttp.ClientError, OSError, TimeoutError):
            return True

    def _abort_later(self, rid: str) -> None:
        task = asyncio.create_task(self._abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    # Health ----------------------------------------------------------------------------------------------------------

    def works(self) -> None:
        if not self.up:
            log.info("engine is back", extra={"engine": self.url})
        self.up, self.strikes, self.why = True, 0, ""

    def failed(self, why: str, status: int = 0) -> None:
        """Take it out until it answers again. A busy server stays in."""
        if status in _BUSY:
            return
        self.strikes += 1
        self.why = why.split("\n")[0][:200]
        if self.up:
            log.warning("engine is out", extra={"engine": self.url, "why": why[:200]})
        self.up = False
        if self._prober is None or self._prober.done():
            self._prober = asyncio.create_task(self._probe())

    async def _probe(self) -> None:
        first, most = PROBE_EVERY
        while not self.up:
            # A server that answers probes and fails at work is let in ever less often.
            await asyncio.sleep(min(first * 2 ** min(self.strikes - 1, 16), most) * random.uniform(0.8, 1.2))
            try:
                timeout = aiohttp.ClientTimeout(total=5)
                async with self._http.get(self.url + self._wire.probe, timeout=timeout) as response:
                    alive = response.status < 500
            except (aiohttp.ClientError, OSError, TimeoutError):
                alive = False
            if alive and not self.up:
                log.info("engine is back", extra={"engine": self.url})
                self.up = True
            elif not alive:
                self.strikes += 1

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1


class _Limit:
    """A time limit that somebody else may set while it runs."""

    def __init__(self) -> None:
        self._when: float | None = None
        self._timeout: asyncio.Timeout | None = None

    def running(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout_at(self._when)
        return self._timeout

    def within(self, seconds: float, keep: bool = True) -> None:
        """End it in `seconds` at the latest."""
        when = asyncio.get_running_loop().time() + seconds
        when = when if self._when is None else min(self._when, when)
        if keep:
            self._when = when
        if self._timeout is not None and not self._timeout.expired():
            with contextlib.suppress(RuntimeError):  # it is over already, or hasn't begun: then it begins with this one
                self._timeout.reschedule(when)


def _too_long(refusal: Exception) -> bool:
    return isinstance(refusal, CallError) and refusal.kind == "context_overflow"


def _status(error: Any) -> int:
    """The HTTP status of an error that came inside a stream; SGLang's input checks carry none."""
    if isinstance(error, dict):
        code = error.get("code", error.get("status_code"))
        if isinstance(code, int):
            return code
    return 400


def _said(text: str) -> str:
    """What a refusal says, without its wrapping."""
    try:
        found: Any = json.loads(text)
    except ValueError:
        found = text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return " ".join(str(found).split())[:300]


async def _sent(session: Any, context: Any, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.sent()
