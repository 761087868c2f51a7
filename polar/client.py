"""What a trainer uses: results from the queue, at least once, each held until it is acknowledged.

    with ResultsConsumer("redis://…", "s3://…") as results:
        for delivery in results:
            train(delivery.result)
            delivery.ack()

A delivery belongs to its consumer while both live. When the process dies, or drops the delivery without `ack` or `nack`,
it comes again, to whichever consumer of the group asks first.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import redis
from msgspec import Struct

from polar.errors import NotFound, PolarError
from polar.export import read_result, to_torch
from polar.holding import Holder
from polar.objects import open_objects
from polar.patience import patiently
from polar.result import SessionResult
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.scripts import register

log = logging.getLogger("polar.client")
T = TypeVar("T")

# A blocking read must end before the socket's own time-out (30 s).
_BLOCK = 5.0
_RETRY_SECONDS = 120.0


class Dead(Struct, frozen=True, kw_only=True):
    """A reference given up: what it said (`fields`), and why."""

    id: str
    reason: str
    failures: int
    fields: dict[str, str]


class Delivery:
    """One result. Keep the object until the work with it is done: while it lives, nobody else gets it."""

    result: SessionResult

    def __init__(self, consumer: ResultsConsumer, entry: str, redelivered: bool):
        self._consumer = consumer
        self.id = entry
        self.redelivered = redelivered

    def ack(self) -> bool:
        """Done with it. Exactly this entry is acknowledged; False if it was before (by a second delivery)."""
        return self._consumer._ack(self)

    def nack(self, reason: str = "", delay: float = 0.0) -> None:
        """Not done: it comes again after `delay` seconds; after `max_failures` of these it moves to the dead list."""
        self._consumer._return(self, reason or "nack", delay, count=True)


class GroupDelivery(Delivery):
    """A task's complete group: `results` in the order of the samples. `missing` are sessions that a `min_k` group did
    not wait for."""

    task_id: str
    results: list[SessionResult]
    missing: list[str]


class ResultsConsumer:
    """Iterates over results (or whole groups, with `groups=True`) of one queue, as one consumer of `group`.

    Each group gets every result once; the consumers of a group share them. A new group starts with the oldest result
    that is still there. `block_seconds` ends the iteration when nothing came for so long (None: never). What a dead
    consumer held comes again after `min_idle_seconds` (the same for all consumers of a group). A given `consumer` name
    must be one process's own: after its restart it gets what it held at once. A result that can't be read is tried
    `max_failures` times, then kept in `dead()` with the reason. Outages of Redis and of the object store are waited
    out."""

    def __init__(
        self,
        store_url: str,
        objects_url: str,
        *,
        namespace: str = "polar",
        queue: str = "results",
        group: str = "trainer",
        consumer: str | None = None,
        groups: bool = False,
        block_seconds: float | None = None,
        min_idle_seconds: float = 60.0,
        max_failures: int = 5,
        idle_consumer_seconds: float = 3600.0,
    ):
        self.keys = Keys(namespace)
        self.stream = self.keys.groups(queue) if groups else self.keys.results(queue)
        self.group = group
        self.name = consumer or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.groups = groups
        self.block_seconds = block_seconds
        self.min_idle = min_idle_seconds
        self.max_failures = max(1, max_failures)
        self.idle_consumer = idle_consumer_seconds
        self.redis: Any = connect(store_url)
        self.objects = open_objects(objects_url)
        scripts = ("ack", "claim", "hold", "retry", "return", "tidy")
        self._scripts = {n: register(self.redis, f"results_{n}") for n in scripts}
        self._holder = Holder(self._hold, min_idle_seconds / 3)
        # Only a consumer that had a life before holds anything under its name.
        self._history: str | None = "0" if consumer else None
        self._claim_at = 0.0
        self._claim_cursor = "0-0"
        self._tidy_at = 0.0
        self._closed = False
        self._retried(self._join, time.monotonic() + _RETRY_SECONDS)

    # Reading ---------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        while (delivery := self.get(self.block_seconds)) is not None:
            yield delivery

    def get(self, timeout: float | None = None) -> Any:
        """The next Delivery (or GroupDelivery); None if nothing came within `timeout` seconds (None: wait for ever).
        Raises PolarError `store_unavailable` if Redis was away when the time was over."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._closed:
            found = self._retried(lambda: self._entry(deadline), deadline)
            if found is not None:
                delivery = self._load(*found)
                if delivery is not None:
                    return delivery
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        return None

    def _entry(self, deadline: float | None) -> tuple[str, dict[bytes, bytes], bool] | None:
        """(id, fields, redelivered): what this consumer held before its restart, what the dead left, then what is new."""
        if self._history is not None:
            reply = self.redis.xreadgroup(self.group, self.name, {self.stream: self._history}, count=1)
            if reply and reply[0][1]:
                entry, fields = reply[0][1][0]
                self._history = entry.decode()
                return entry.decode(), fields or {}, True
            self._history = None
        now = time.monotonic()
        if now >= self._claim_at:
            args = [self.group, self.name, int(self.min_idle * 1000), self._claim_cursor]
            cursor, entries, *_ = self._scripts["claim"](keys=[self.stream, self._failures], args=args)
            self._claim_cursor = cursor.decode()
            if self._claim_cursor == "0-0":
                self._claim_at = now + min(5.0, self.min_idle / 2)
                self._tidy(now)
            if entries and entries[0] is not None:
                entry, flat = entries[0]
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                # A pause of the whole process may let our own go idle; it is still being worked on.
                return None if self._holder.has(entry.decode()) else (entry.decode(), fields, True)
            if self._claim_cursor != "0-0":
                return None
        wait = max(0.001, min(_BLOCK, self._claim_at - now, _BLOCK if deadline is None else deadline - now))
        reply = self.redis.xreadgroup(
            self.group, self.name, {self.stream: ">"}, count=1, block=max(1, int(wait * 1000))
        )
        if not reply:
            return None
        entry, fields = reply[0][1][0]
        return entry.decode(), fields, False

    def _load(self, entry: str, fields: dict[bytes, bytes], redelivered: bool) -> Delivery | None:
        delivery = (GroupDelivery if self.groups else Delivery)(self, entry, redelivered)
        self._holder.add(entry, delivery)
        if not fields:  # the entry is gone from the stream: there is nothing left to deliver
            self._ack(delivery)
            return None
        try:
            if isinstance(delivery, GroupDelivery):
                self._load_group(delivery, fields[b"task"].decode())
            else:
                delivery.result = read_result(self.objects, fields[b"key"].decode())
        except PolarError as e:
            level = logging.WARNING if e.retryable else logging.ERROR
            log.log(level, "delivery %s of %s: %s: %s", entry, self.stream, e.code, e.message)
            self._return(delivery, f"{e.code}: {e.message}", min(1.0, self.min_idle), count=not e.retryable)
            return None
        return delivery

    def _load_group(self, delivery: GroupDelivery, task: str) -> None:
        ids = [s.decode() for s in self._retried(lambda: self.redis.lrange(self.keys.task_sessions(task), 0, -1))]
        if not ids:
            raise NotFound(f"no task '{task}'")

        def states() -> list[Any]:
            pipe = self.redis.pipeline(transaction=False)
            for s in ids:
                pipe.hmget(self.keys.session(s), "state", "result")
            return pipe.execute()

        pairs = list(zip(ids, self._retried(states), strict=True))
        delivery.task_id = task
        delivery.missing = [s for s, (state, _) in pairs if state != b"DONE"]
        delivery.results = [read_result(self.objects, key.decode()) for _, (state, key) in pairs if state == b"DONE"]

    # Acknowledging ---------------------------------------------------------------------------------------------------

    def _ack(self, delivery: Delivery) -> bool:
        args = [self.group, delivery.id]
        acked = self._retried(lambda: self._scripts["ack"](keys=[self.stream, self._failures], args=args))
        self._holder.drop(delivery.id)
        return bool(acked)

    def _return(self, delivery: Delivery, reason: str, delay: float, *, count: bool) -> None:
        self._holder.drop(delivery.id)
        idle = int((self.min_idle - delay) * 1000)
        args = [self.group, self.name, delivery.id, idle, self.max_failures if count else 0, reason[:1000]]
        keys = [self.stream, self._failures, self._dead]
        outcome = self._retried(lambda: self._scripts["return"](keys=keys, args=args))
        if outcome == b"dead":
            log.error("%s of %s is given up, see dead(): %s", delivery.id, self.stream, reason)
        self._claim_at = min(self._claim_at, time.monotonic() + delay)

    def _hold(self, ids: list[str]) -> list[int]:
        return self._scripts["hold"](keys=[self.stream], args=[self.group, self.name, *ids])

    def dead(self) -> list[Dead]:
        """The references given up in this group, oldest first."""
        items = self._retried(lambda: self.redis.lrange(self._dead, 0, -1))
        return [Dead(**json.loads(i)) for i in items]

    def retry_dead(self) -> int:
        """Put the dead references back into the queue, each once whoever else does the same. Returns how many."""
        there = left = self._retried(lambda: self.redis.llen(self._dead))
        while left > 0 and (taken := self._retried(partial(self._retry, min(left, 500)))):
            left -= taken
        return there - left

    def _retry(self, most: int) -> int:
        return self._scripts["retry"](keys=[self.stream, self._dead], args=[most])

    @property
    def _failures(self) -> str:
        return f"{self.stream}:{self.group}:failures"

    @property
    def _dead(self) -> str:
        return dead_key(self.stream, self.group)

    # Life ------------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back what was not acknowledged, at once, and leave the group."""
        if self._closed:
            return
        self._closed = True
        self._holder.stop()
        try:
            for delivery in self._holder.drain():
                args = [self.group, self.name, delivery.id, int(self.min_idle * 1000) + 1, 0, ""]
                self._scripts["return"](keys=[self.stream, self._failures, self._dead], args=args)
            self._scripts["tidy"](keys=[self.stream], args=[self.group, int(self.idle_consumer * 1000), ""])
        except redis.RedisError as e:
            log.warning("closing: %s", e)
        self.redis.close()

    def __enter__(self) -> ResultsConsumer:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _join(self) -> None:
        try:
            # From the start of the stream: nothing that came before the first consumer is missed.
            self.redis.xgroup_create(self.stream, self.group, id="0", mkstream=True)
        except redis.ResponseError as e:
            if "BUSYGROUP" not in str(e):
                raise

    def _tidy(self, now: float) -> None:
        if now >= self._tidy_at:
            self._tidy_at = now + 60.0
            self._scripts["tidy"](keys=[self.stream], args=[self.group, int(self.idle_consumer * 1000), self.name])

    def _retried(self, call: Callable[[], T], deadline: float | None = -1.0) -> T:
        """Over outages of Redis until `deadline` (None: for ever; -1: two minutes). Every call here may be repeated: what
        a lost answer had read stays pending and comes again."""
        if deadline == -1.0:
            deadline = time.monotonic() + _RETRY_SECONDS
        # A missing group means that the server lost its data: begin again with what is there.
        return patiently(call, deadline, rejoin=self._join, stopped=lambda: self._closed)


def dead_key(stream: str, group: str) -> str:
    """LIST of references that a group gave up on."""
    return f"{stream}:{group}:dead"


__all__ = ["Dead", "Delivery", "GroupDelivery", "ResultsConsumer", "read_result", "to_torch"]
