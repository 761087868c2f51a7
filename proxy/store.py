"""The capture store as the proxy uses it: Redis may be away for a while, and nothing sampled is lost over that."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import OrderedDict

import redis.exceptions

from polar.completion import Completion
from polar.store.capture import AsyncCapture, Grant, Note
from proxy.attempt import Attempt
from proxy.failures import CallError, gone, unavailable, unknown_capability

log = logging.getLogger("polar.proxy")

ERRORS = (redis.exceptions.RedisError, OSError, TimeoutError)
STORE_WINDOW = 60.0  # how long a finished completion may wait for Redis before its client is told
_GRANTS = 8192

_LIMITS = {
    "turn_limit": "this session has used all its turns",
    "token_limit": "this session has used all its tokens",
}


class Store:
    def __init__(self, capture: AsyncCapture, window: float = STORE_WINDOW):
        self._capture = capture
        self._window = window
        self._grants: OrderedDict[str, Grant] = OrderedDict()
        self._cleanups: set[asyncio.Task] = set()

    async def grant(self, capability: str) -> Grant:
        """Raises CallError: unauthorized, gone, or unavailable."""
        key = hashlib.sha256(capability.encode("utf-8", "surrogateescape")).hexdigest()
        grant = self._grants.get(key)
        if grant is None:
            try:
                grant = await self._capture.grant(capability)
            except ERRORS as e:
                raise _away() from e
            if grant is None:
                raise unknown_capability()
            # A capability always means the same grant; whether it is still open is asked with every call.
            self._grants[key] = grant
            if len(self._grants) > _GRANTS:
                self._grants.popitem(last=False)
        if grant.expires_at and time.time() > grant.expires_at:
            raise gone("this session's time is over")
        return grant

    async def check_open(self, grant: Grant) -> None:
        try:
            state = await self._capture.state(grant.attempt_id)
        except ERRORS as e:
            raise _away() from e
        if state != "open":
            raise gone()

    async def sync(self, attempt: Attempt) -> None:
        try:
            await attempt.sync(self._capture)
        except ERRORS as e:
            raise _away() from e

    async def begin(self, grant: Grant, completion_id: str) -> int:
        """Register a generation and count a turn; returns its index. Raises CallError."""
        try:
            status, index = await self._capture.begin(grant, completion_id)
        except BaseException as e:
            # The answer may be lost after the turn was counted: take it back when Redis is there again.
            self._later(self._end(grant, completion_id, None, 600.0))
            if isinstance(e, ERRORS):
                raise _away() from e
            raise
        if status == "ok":
            return index
        if status in _LIMITS:
            raise CallError("limit", _LIMITS[status], code=status)
        raise gone()

    async def end(self, grant: Grant, completion_id: str, completion: Completion) -> None:
        """Store a completion, waiting for Redis if need be. After the window the client is told, and the rest of the
        retries happen behind its back."""
        task = self._later(self._end(grant, completion_id, completion, 600.0))
        done, _ = await asyncio.wait({task}, timeout=self._window)
        if not done or not task.result():
            raise unavailable("the answer could not be stored", "store_unavailable", 5)

    async def abandon(self, grant: Grant, completion_id: str) -> None:
        """Nothing was sampled: no turn is charged. Doesn't wait longer than a moment; a stored one is left as it is."""
        task = self._later(self._end(grant, completion_id, None, 600.0))
        await asyncio.wait({task}, timeout=1.0)

    async def note(self, grant: Grant, error: CallError) -> None:
        """Remember a call that was not answered, if it says something about how the session will end."""
        what: Note | None = None
        if error.kind in ("unavailable", "internal") and error.code != "aborted":
            what = "infra"
        elif error.kind == "context_overflow":
            what = "context_overflow"
        if what:
            with contextlib.suppress(*ERRORS):
                await self._capture.note(grant, what, f"{error.code}: {error.message}")

    async def flush(self, timeout: float) -> None:
        """Wait for stores that are still being retried."""
        if self._cleanups:
            await asyncio.wait(set(self._cleanups), timeout=timeout)

    async def _end(self, grant: Grant, completion_id: str, completion: Completion | None, window: float) -> bool:
        deadline, pause = time.monotonic() + window, 0.05
        while True:
            try:
                await self._capture.end(grant, completion_id, completion)
                return True
            except ERRORS as e:
                if time.monotonic() > deadline:
                    log.error("completion lost", extra={"completion": completion_id, "why": type(e).__name__})
                    return False
                log.warning("store retry", extra={"completion": completion_id, "why": type(e).__name__})
            await asyncio.sleep(pause)
            pause = min(pause * 2, 1.0)

    def _later(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return task


def _away() -> CallError:
    return unavailable("the session store is not reachable", "store_unavailable", 2)
