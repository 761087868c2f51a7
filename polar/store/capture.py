"""Capabilities and captured completions: where the proxy (asyncio) and the stages (blocking) meet.

A capability is kept only as its SHA-256, so that reading the store gives no access to the model.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any, Literal

from msgspec import Struct, field

from polar.codec import pack, unpack
from polar.completion import Completion
from polar.ids import attempt_id, new_capability
from polar.result import Usage
from polar.store.keys import Keys
from polar.store.scripts import register
from polar.task import SamplingSpec, TaskRequest

Note = Literal["infra", "context_overflow"]

# What is left of an attempt in Redis is forgotten after this, should nobody clean it up (seconds).
RETENTION = 7 * 86400
_FORGET_PROXY = 3600  # seconds of silence; drain() gives up on one long before


class Grant(Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What a capability allows: model calls as one attempt of one session, within its budgets (0 = no limit)."""

    session_id: str
    attempt: int
    task_id: str
    model: str
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    max_turns: int = 0
    max_total_tokens: int = 0
    expires_at: float = 0.0

    @classmethod
    def of(cls, task: TaskRequest, session_id: str, attempt: int, expires_at: float) -> Grant:
        """What the task allows one attempt."""
        return cls(
            session_id=session_id,
            attempt=attempt,
            task_id=task.task_id,
            model=task.agent.model_name,
            sampling=task.agent.sampling,
            max_turns=task.max_turns or 0,
            max_total_tokens=task.max_total_tokens or 0,
            expires_at=expires_at,
        )

    @property
    def attempt_id(self) -> str:
        return attempt_id(self.session_id, self.attempt)


class Seen(Struct):
    """How far one reader knows an attempt's capture stream: its first `count` entries, the last of which is `last`."""

    count: int = 0
    last: str = "-"

    def take(self, entry: str) -> bool:
        """Note one more entry; False if it was known."""
        if self.last != "-" and _order(entry) <= _order(self.last):
            return False
        self.count, self.last = self.count + 1, entry
        return True


def _order(entry: str) -> tuple[int, int]:
    time, _, sequence = entry.partition("-")
    return int(time), int(sequence)


def _seconds(time: tuple[int, int]) -> float:
    """What the command TIME answered."""
    return time[0] + time[1] / 1e6


def digest(capability: str) -> str:
    return hashlib.sha256(capability.encode("utf-8", "surrogateescape")).hexdigest()


class CaptureStore:
    """The stages' side (blocking)."""

    def __init__(self, client: Any, keys: Keys):
        self.redis = client
        self.keys = keys

    def now(self) -> float:
        """The store's clock, by which grants expire (Unix seconds). Those of the hosts may differ."""
        return _seconds(self.redis.time())

    def mint(self, grant: Grant) -> str:
        """A fresh capability for the attempt; opens its counters."""
        capability = new_capability()
        ttl = max(60, int(grant.expires_at - self.now()) + 3600) if grant.expires_at else RETENTION
        pipe = self.redis.pipeline(transaction=True)
        pipe.set(self.keys.capability(digest(capability)), pack(grant), ex=ttl)
        pipe.hset(self.keys.attempt(grant.attempt_id), "state", "open")
        pipe.expire(self.keys.attempt(grant.attempt_id), RETENTION)
        pipe.execute()
        return capability

    def revoke(self, attempt: str) -> None:
        """No further call is served; proxies abort what is in flight (its tokens are still stored). Idempotent."""
        pipe = self.redis.pipeline(transaction=True)
        pipe.hset(self.keys.attempt(attempt), "state", "closed")
        pipe.expire(self.keys.attempt(attempt), RETENTION)
        pipe.xadd(self.keys.revoked, {"a": attempt}, maxlen=10_000, approximate=True)
        pipe.execute()

    def drain(self, attempt: str, timeout: float) -> int:
        """Wait until every generation of the attempt is stored. Returns how many never were (their proxy died)."""
        deadline = time.monotonic() + timeout
        while True:
            flight = self.redis.hgetall(self.keys.inflight(attempt))
            if not flight:
                return 0
            beats, now = self.redis.hgetall(self.keys.proxies), self.now()
            owners = {value.rpartition(b"|")[0] for value in flight.values()}
            alive = [p for p in owners if now - float(beats.get(p, 0)) < 10]
            if not alive or time.monotonic() > deadline:
                return len(flight)
            time.sleep(0.05)

    def read(self, attempt: str) -> list[Completion]:
        return [unpack(e[b"c"], Completion) for _, e in self.redis.xrange(self.keys.capture(attempt))]

    def usage(self, attempt: str) -> tuple[Usage, str]:
        """Counters, and the limit that the attempt ran into ("" if none)."""
        h = self.redis.hgetall(self.keys.attempt(attempt))
        n = {k: int(h.get(k.encode(), 0)) for k in ("turns", "prompt_tokens", "sampled_tokens", "cached_tokens")}
        return Usage(**n), h.get(b"limit", b"").decode()

    def notes(self, attempt: str) -> dict[Note, str]:
        """What the proxy noted about calls of the attempt that it could not answer."""
        names: tuple[Note, ...] = ("infra", "context_overflow")
        values = self.redis.hmget(self.keys.attempt(attempt), *names)
        return {n: v.decode() for n, v in zip(names, values, strict=True) if v}

    def forget(self, attempt: str) -> None:
        self.redis.delete(self.keys.capture(attempt), self.keys.inflight(attempt), self.keys.stored(attempt))
        # The counters stay a while: a late call must learn that the session ended, not that it never was.
        self.redis.expire(self.keys.attempt(attempt), 3600)


class AsyncCapture:
    """The proxy's side (asyncio)."""

    def __init__(self, client: Any, keys: Keys, proxy_id: str):
        self.redis = client
        self.keys = keys
        self.proxy_id = proxy_id
        self.alone = True  # as of the last beat: no other proxy serves this store
        self._epoch = time.time() - time.monotonic()  # the store's clock when this host's monotonic one was 0
        self._begin = register(client, "capture_begin")
        self._end = register(client, "capture_end")

    def now(self) -> float:
        """The store's clock without asking it (Unix seconds); this host's own until the first beat."""
        return self._epoch + time.monotonic()

    async def grant(self, capability: str) -> Grant | None:
        raw = await self.redis.get(self.keys.capability(digest(capability)))
        return unpack(raw, Grant) if raw else None

    async def state(self, attempt: str) -> str:
        """`open`, `closed`, or `unknown`."""
        return ((await self.redis.hget(self.keys.attempt(attempt), "state")) or b"unknown").decode()

    async def begin(self, grant: Grant, completion_id: str, seen: Seen) -> tuple[str, int, list[Completion]]:
        """Register a generation (safe to repeat after a lost answer): ("ok", index, news), or (reason, -1, news) with
        reason `unknown`, `closed`, `turn_limit` or `token_limit`. The news are the completions that `seen` didn't have, and
        are in it from now on; with news, a limit is not yet noted as the session's end."""
        a = grant.attempt_id
        limits = [grant.max_turns, grant.max_total_tokens]
        status, index, entries = await self._begin(
            keys=[self.keys.attempt(a), self.keys.inflight(a), self.keys.capture(a)],
            args=[completion_id, self.proxy_id, *limits, seen.count, seen.last],
        )
        news = [unpack(fields[1], Completion) for entry, fields in entries if seen.take(entry.decode())]
        return status.decode(), int(index), news

    async def end(
        self, grant: Grant, completion_id: str, completion: Completion | None, seen: Seen | None = None
    ) -> str:
        """Store the completion (None: nothing was sampled). Safe to repeat after a lost answer. Returns the attempt's
        state, or `duplicate`. It enters `seen` if that knew all that came before it."""
        a = grant.attempt_id
        c = completion
        args: list[Any] = [completion_id, b"", 0, 0, 0, RETENTION, 0]
        if c is not None:
            args = [completion_id, pack(c), c.prompt_length, len(c.sampled_ids), c.cached_tokens, RETENTION]
            args.append(int(c.finish_reason not in ("abort", "error")))
        keys = [self.keys.attempt(a), self.keys.inflight(a), self.keys.capture(a), self.keys.stored(a)]
        state, *stored = await self._end(keys=keys, args=args)
        if stored and seen is not None and stored[0] == seen.count + 1:
            seen.take(stored[1].decode())
        return state.decode()

    async def note(self, grant: Grant, what: Note, message: str) -> None:
        """Remember that a call could not be answered: `infra`, through no fault of the agent (its error is then not the
        policy's), or `context_overflow`. Forgotten when a call that begins later is answered."""
        key = self.keys.attempt(grant.attempt_id)
        begun = await self.redis.hget(key, "next_index")
        await self.redis.hset(key, mapping={what: message[:500], f"{what}_at": int(begun or 0)})

    async def read(self, attempt: str, seen: Seen) -> list[Completion]:
        """The completions that `seen` doesn't have; they are in it from now on."""
        start = "-" if seen.last == "-" else f"({seen.last}"
        entries = await self.redis.xrange(self.keys.capture(attempt), min=start)
        return [unpack(e[b"c"], Completion) for i, e in entries if seen.take(i.decode())]

    async def beat(self) -> None:
        """Sign of life: must be called every few seconds (drain() gives up on proxies silent for 10 s)."""
        now = _seconds(await self.redis.time())
        self._epoch = now - time.monotonic()
        await self.redis.hset(self.keys.proxies, self.proxy_id, now)
        beats = await self.redis.hgetall(self.keys.proxies)
        self.alone = not any(p.decode() != self.proxy_id and now - float(t) < 10 for p, t in beats.items())
        if dead := [p for p, t in beats.items() if now - float(t) > _FORGET_PROXY]:
            await self.redis.hdel(self.keys.proxies, *dead)

    async def delivered(self, answers: list[tuple[str, str]]) -> None:
        """Note of whole answers, as (attempt, completion id), that their clients got to their end."""
        pipe = self.redis.pipeline(transaction=False)
        for attempt, completion_id in answers:
            pipe.hdel(self.keys.attempt(attempt), f"undelivered:{completion_id}")
        await pipe.execute()

    async def undelivered(self, attempt: str, completion_id: str) -> bool:
        """Whether nothing is known of a client that got the whole answer."""
        return bool(await self.redis.hexists(self.keys.attempt(attempt), f"undelivered:{completion_id}"))

    async def revocations(self, after: str) -> tuple[str, list[str]]:
        """Attempts revoked since stream id `after`; blocks up to 5 s. Returns (last id, attempts). Begin with the id of
        the stream's last entry: "$" would mean a later "now" in each call."""
        reply = await self.redis.xread({self.keys.revoked: after}, block=5000, count=1000)
        if not reply:
            return after, []
        entries = reply[0][1]
        return entries[-1][0].decode(), [e[b"a"].decode() for _, e in entries]
