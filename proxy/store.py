"""The capture store as the proxy uses it: Redis may be away for a while, and nothing sampled is lost over that."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable

import redis.exceptions

from polar.completion import Completion
from polar.store.capture import AsyncCapture, Grant, Note
from proxy.attempt import Attempt
from proxy.failures import CallError, gone, unavailable, unknown_capability

log = logging.getLogger("polar.proxy")

ERRORS = (redis.exceptions.RedisError, OSError, TimeoutError)
STORE_WINDOW = 60.0  # how long a finished completion may wait for Redis before its client is told
MOMENT = 1.0  # how long a client waits for what doesn't change its answer
_GRANTS = 8192

_LIMITS = {
    "turn_limit": "this session has used all its turns",
    "token_limit": "this session has used all its tokens",
}


def _nothing() -> None:
    pass


class Store:
    def __init__(self, capture: AsyncCapture, window: float = STORE_WINDOW, retried: Callable[[], None] = _nothing):
        self._capture = capture
        self._window = window
        self._retried = retried
        self._grants: OrderedDict[str, Grant] = OrderedDict()
        self._cleanups: set[asyncio.Task] = set()
        self._delivered: list[tuple[str, str]] = []

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
        if grant.expires_at and self._capture.now() > grant.expires_at:
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
        """Take in what was stored since the last time, by this proxy or another."""
        try:
            news = await self._capture.read(attempt.id, attempt.seen)
        except ERRORS as e:
            raise _away() from e
        for completion in news:
            attempt.add(completion)

    async def begin(self, grant: Grant, completion_id: str, attempt: Attempt) -> tuple[int, bool]:
        """Register a generation and count a turn. Raises CallError. Returns its index, and whether others had stored
        something that the attempt now has, so that it should be planned again; the index is -1 if the budget is used up
        and what was taken in may be the answer: else begin again."""
        known = attempt.seen.count
        try:
            status, index, news = await self._capture.begin(grant, completion_id, attempt.seen)
        except BaseException as e:
            # The answer may be lost after the turn was counted: take it back when Redis is there again.
            self.give_back(grant, completion_id)
            if isinstance(e, ERRORS):
                raise _away() from e
            raise
        for completion in news:
            attempt.add(completion)
        moved = attempt.seen.count > known  # another call may have taken the same news in
        if status == "ok" or (status in _LIMITS and moved):
            return index, moved
        if status in _LIMITS:
            raise CallError("limit", _LIMITS[status], code=status)
        raise gone()

    async def end(self, grant: Grant, completion_id: str, completion: Completion, attempt: Attempt) -> None:
        """Store a completion, waiting for Redis if need be. After the window the client is told, and the rest of the
        retries happen behind its back."""
        task = self._later(self._end(grant, completion_id, completion, 600.0, attempt))
        done, _ = await asyncio.wait({task}, timeout=self._window)
        if not done or not task.result():
            raise unavailable("the answer could not be stored", "store_unavailable", 5)

    async def abandon(self, grant: Grant, completion_id: str) -> None:
        """As give_back(), but waits for it a moment."""
        await asyncio.wait({self.give_back(grant, completion_id)}, timeout=MOMENT)

    def give_back(self, grant: Grant, completion_id: str) -> asyncio.Task:
        """Nothing was sampled: no turn is charged. Idempotent; a stored one is left as it is."""
        return self._later(self._end(grant, completion_id, None, 600.0))

    async def note(self, grant: Grant, error: CallError, attempt: Attempt) -> None:
        """Remember a call that was not answered, if it says something about how the session will end."""
        what: Note | None = None
        if error.kind in ("unavailable", "internal") and error.code != "aborted":
            what = "infra"
        elif error.kind == "context_overflow":
            what = "context_overflow"
        if what:
            task = self._later(self._note(grant, what, f"{error.code}: {error.message}", attempt))
            await asyncio.wait({task}, timeout=MOMENT)

    @property
    def alone(self) -> bool:
        return self._capture.alone

    def delivered(self, attempt_id: str, completion_id: str) -> None:
        """Note that an answer reached its client: told to the store with the next beat. Until then another proxy, or this
        one after a restart, would replay it to the same request: one sample, as after a lost answer."""
        self._delivered.append((attempt_id, completion_id))

    async def tell_delivered(self) -> None:
        told, self._delivered = self._delivered, []
        try:
            if told:
                await self._capture.delivered(told)
        except BaseException:
            self._delivered = [*told, *self._delivered][-_GRANTS:]
            raise

    async def undelivered(self, attempt_id: str, completion_id: str) -> bool:
        try:
            return await self._capture.undelivered(attempt_id, completion_id)
        except ERRORS as e:
            raise _away() from e

    async def flush(self, timeout: float) -> int:
        """Wait for stores that are still being retried. How many are left."""
        if self._cleanups:
            await asyncio.wait(set(self._cleanups), timeout=timeout)
        return len(self._cleanups)

    async def _note(self, grant: Grant, what: Note, message: str, attempt: Attempt) -> None:
        known = attempt.seen.count
        try:
            await self._kept(
                "note",
                grant.session_id,
                600.0,
                lambda: self._capture.note(grant, what, message),
                unless=lambda: attempt.seen.count > known,
            )
        except Exception as e:  # it helps to explain an end, no more
            log.warning("note lost", extra={"session": grant.session_id, "why": type(e).__name__})

    async def _end(
        self,
        grant: Grant,
        completion_id: str,
        completion: Completion | None,
        window: float,
        attempt: Attempt | None = None,
    ) -> bool:
        async def work() -> None:
            await self._capture.end(grant, completion_id, completion, attempt.seen if attempt is not None else None)
            if attempt is not None and completion is not None:
                attempt.add(completion)  # what is in `seen` must be known: nobody asks for it again

        return await self._kept("completion", completion_id, window, work)

    async def _kept(
        self,
        what: str,
        key: str,
        window: float,
        work: Callable[[], Awaitable[None]],
        unless: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Do it, again and again while Redis is away; False if it was away for the whole window. Not again once `unless`."""
        deadline, pause = time.monotonic() + window, 0.05
        while True:
            try:
                await work()
                return True
            except ERRORS as e:
                if time.monotonic() > deadline:
                    log.error(f"{what} lost", extra={what: key, "why": type(e).__name__})
                    return False
                self._retried()
                log.warning("store retry", extra={what: key, "why": type(e).__name__})
            await asyncio.sleep(pause)
            if unless():
                return True
            pause = min(pause * 2, 1.0)

    def _later(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return task


def _away() -> CallError:
    return unavailable("the session store is not reachable", "store_unavailable", 2)
