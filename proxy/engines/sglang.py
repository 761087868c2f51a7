"""SGLang's native contract: POST /generate with token ids, POST /abort_request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import aiohttp
import msgspec

from polar.errors import EngineError
from proxy.engines.base import Order, Sample
from proxy.engines.sglang_wire import Events, Reader
from proxy.failures import CallError, overflow, unavailable

log = logging.getLogger("polar.proxy")

RETRY_WINDOW = 30.0  # weights may be swapping, or a supervisor restarting the engine
SLOW_ACCEPT = 5.0  # a request that was sent and not answered for so long counts as accepted: the engine is just busy
DRAIN = 15.0  # how long an aborted generation may take to end
_TOO_LONG = re.compile(r"longer than the model's context|maximum (allowed|context) length|context length", re.I)


class SGLang:
    name = "sglang"

    def __init__(self, url: str, context_length: int, api_key: str | None = None, window: float = RETRY_WINDOW):
        self.url = url.rstrip("/")
        self._context = context_length
        self._window = window
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        trace = aiohttp.TraceConfig()
        trace.on_request_headers_sent.append(_sent)
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
            headers=headers,
            trace_configs=[trace],
            auto_decompress=False,
            json_serialize=lambda o: msgspec.json.encode(o).decode(),
        )

    async def close(self) -> None:
        await self._http.close()

    async def generate(self, order: Order) -> Sample:
        # Not limited until it is aborted: then the engine gets a while to end the stream by itself.
        limit = _Limit()
        aborter = asyncio.create_task(self._abort_on(order, limit))
        try:
            return await self._attempts(order, limit)
        finally:
            aborter.cancel()

    async def _attempts(self, order: Order, limit: _Limit) -> Sample:
        deadline = time.monotonic() + self._window
        pause = 0.1
        body = msgspec.json.encode(_body(order))
        while not order.cancel.is_set():
            try:
                return await self._once(order, body, limit)
            except EngineError as e:
                if not e.retryable or time.monotonic() + pause > deadline:
                    raise unavailable(f"inference engine: {e.message}", "engine_unavailable", 5) from e
                log.warning("engine retry", extra={"completion": order.rid, "status": e.status, "why": e.message[:200]})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(order.cancel.wait(), pause * random.uniform(0.7, 1.3))
            pause = min(pause * 2, 3.0)
        return Sample()

    async def _once(self, order: Order, body: bytes, limit: _Limit) -> Sample:
        """One request to the engine. EngineError while nothing was sampled."""
        reader = Reader()
        try:
            async with limit.fresh():
                await self._request(order, body, reader, limit)
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            if not reader.ids and not order.cancel.is_set():
                raise EngineError(f"{type(e).__name__}: {e}"[:300]) from e
        if not reader.ids and not order.cancel.is_set():
            if reader.error is not None:
                raise self._refusal(_status(reader.error), json.dumps(reader.error).encode(), order)
            raise EngineError("the stream ended without a token")
        sample = reader.sample()
        if sample.end == "failed" and order.cancel.is_set():
            sample.end = "abort"
        return sample

    async def _request(self, order: Order, body: bytes, reader: Reader, limit: _Limit) -> None:
        timer: list[asyncio.TimerHandle] = []
        loop = asyncio.get_running_loop()

        def sent() -> None:
            timer.append(loop.call_later(SLOW_ACCEPT, order.accepted))

        context = SimpleNamespace(sent=sent)
        headers = {"Content-Type": "application/json"}
        try:
            async with self._http.post(
                f"{self.url}/generate", data=body, headers=headers, trace_request_ctx=context
            ) as response:
                if response.status != 200:
                    raise self._refusal(response.status, await response.content.read(65536), order)
                order.accepted()
                events = Events()
                while data := await response.content.readany():
                    if new := reader.read(events.push(data)):
                        order.tokens(new)
                    if reader.done:
                        limit.within(
                            1.0, keep=False
                        )  # only the end of the body is left, which makes the connection reusable
        finally:
            for t in timer:
                t.cancel()

    async def _abort_on(self, order: Order, limit: _Limit) -> None:
        """Abort upstream when cancelled; again each second, since an abort that overtakes its request is lost."""
        await order.cancel.wait()
        limit.within(DRAIN)
        while True:
            try:
                timeout = aiohttp.ClientTimeout(total=5)
                async with self._http.post(f"{self.url}/abort_request", json={"rid": order.rid}, timeout=timeout):
                    pass
            except (aiohttp.ClientError, OSError, TimeoutError):
                pass
            await asyncio.sleep(1.0)

    def _refusal(self, status: int, body: bytes, order: Order) -> Exception:
        text = body.decode("utf-8", "replace")[:2000]
        if status == 400 and _TOO_LONG.search(text):
            return overflow(len(order.prompt), self._context)
        if status >= 500 or status in (408, 425, 429) or status == 0:
            return EngineError(f"answered {status}: {text[:200]}", status=status)
        log.error("engine refused", extra={"completion": order.rid, "status": status, "why": text[:300]})
        return CallError("internal", f"the inference engine refused the request ({status})", code="engine_refused")


class _Limit:
    """A time limit that somebody else may set while it runs."""

    def __init__(self) -> None:
        self._when: float | None = None
        self._timeout: asyncio.Timeout | None = None

    def fresh(self) -> asyncio.Timeout:
        self._timeout = asyncio.timeout_at(self._when)
        return self._timeout

    def within(self, seconds: float, keep: bool = True) -> None:
        """End it in `seconds` at the latest; with `keep`, later attempts too."""
        when = asyncio.get_running_loop().time() + seconds
        when = when if self._when is None else min(self._when, when)
        if keep:
            self._when = when
        if self._timeout is not None and not self._timeout.expired():
            with contextlib.suppress(RuntimeError):  # it is over already
                self._timeout.reschedule(when)


def _body(order: Order) -> dict[str, Any]:
    s = order.sampling
    params: dict[str, Any] = {k: s[k] for k in ("max_new_tokens", "temperature", "top_p", "top_k", "min_p")}
    params["stop_token_ids"] = order.stop_ids
    # The proxy decodes ids itself; these only keep the engine from matching stop strings on altered text.
    params["skip_special_tokens"] = False
    if s.get("stop"):
        params["stop"] = s["stop"]
    if s.get("seed") is not None:
        params["sampling_seed"] = s["seed"]
    return {
        "rid": order.rid,
        "input_ids": order.prompt.tolist(),
        "sampling_params": params,
        "return_logprob": True,
        "stream": True,
    }


def _status(error: Any) -> int:
    """The HTTP status of an error that came inside a stream; SGLang's input checks carry none."""
    if isinstance(error, dict):
        code = error.get("code", error.get("status_code"))
        if isinstance(code, int):
            return code
    return 400


async def _sent(session: Any, context: Any, params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx.sent()
