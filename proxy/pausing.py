"""Holding generations back while a trainer changes the weights.

A pause is asked for by a trainer and held by a lease: it ends by itself if the trainer doesn't renew it. What is in flight
either drains first (`wait`; a pause whose drain fails never was one, unless it is somebody else's, too) or goes on (`hold`;
the engine keeps, retracts or aborts it, and what it aborted is taken up again after the pause). Calls that come meanwhile
wait with heartbeats, cost no turn (but for those whose prompt was being planned when the pause began), and are dropped when
their client or session goes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any, Literal

from msgspec import Struct

from polar.errors import Conflict, InvalidTask, PolarError
from polar.ids import new_id

log = logging.getLogger("polar.proxy")

Mode = Literal["wait", "hold"]
LONGEST = 86400.0  # seconds of a lease or a drain


class PauseRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`model`: a row of the table; all of them if it is left out."""

    model: str | None = None
    mode: Mode = "wait"
    timeout_seconds: float = 60.0
    lease_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("timeout_seconds", "lease_seconds"):
            value = getattr(self, name)
            if not 0 < value <= LONGEST:
                raise ValueError(f"{name}: found {value}, allowed: more than 0, at most {LONGEST:.0f}")


class ResumeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """`pause_id`: end only that pause; another's is left as it is."""

    model: str | None = None
    pause_id: str | None = None


class DrainTimeout(PolarError):
    code = "drain_timeout"
    retryable = True


class _Pause:
    """Of one model, shared by all who ask for it. It lasts while somebody drains, and until the latest time promised."""

    def __init__(self, mode: Mode):
        self.id = new_id("pause")
        self.mode = mode
        self.drains = 0  # going on
        self.until = 0.0  # the end of what was promised; 0: nobody was told yet that it is paused
        self.ended = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None


class Flight:
    """A generation between its start and its last token."""

    def __init__(self, pauses: Pauses, model: str):
        self._pauses, self._model = pauses, model

    def land(self) -> None:
        """Idempotent."""
        if self._model:
            self._pauses._landed(self._model)
            self._model = ""


class Pauses:
    """Of one proxy. `models` are the rows of its table."""

    def __init__(self, models: list[str]):
        self._models = models
        self._pauses: dict[str, _Pause] = {}
        self._in_flight: Counter[str] = Counter()
        self._held: Counter[str] = Counter()
        self._moved: asyncio.Future[None] | None = None  # done when something has landed
        self.expired = 0  # pauses that nobody ended

    # Calls -----------------------------------------------------------------------------------------------------------

    def free(self, model: str) -> bool:
        return model not in self._pauses

    async def wait(self, model: str, cancel: asyncio.Event) -> None:
        """Until the model isn't paused, or `cancel` is set."""
        if model not in self._pauses:
            return
        self._held[model] += 1
        try:
            while (pause := self._pauses.get(model)) is not None and not cancel.is_set():
                waits = [asyncio.ensure_future(e.wait()) for e in (pause.ended, cancel)]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for w in waits:
                        w.cancel()
        finally:
            self._held[model] -= 1

    async def again(self, model: str, cancel: asyncio.Event) -> None:
        """The same for a generation that was interrupted: a drain waits for it, so it must not wait for the drain."""
        pause = self._pauses.get(model)
        if pause is not None and not pause.drains:
            await self.wait(model, cancel)

    def begin(self, model: str) -> Flight:
        """To be called at once after wait(): with an await in between, a pause might begin there and not see it."""
        self._in_flight[model] += 1
        return Flight(self, model)

    def _landed(self, model: str) -> None:
        self._in_flight[model] -= 1
        if self._moved is not None and not self._moved.done():
            self._moved.set_result(None)
        self._moved = None

    async def _drained(self, names: list[str]) -> None:
        while any(self._in_flight[n] for n in names):
            if self._moved is None:
                self._moved = asyncio.get_running_loop().create_future()
            await asyncio.shield(self._moved)

    # Trainers --------------------------------------------------------------------------------------------------------

    async def pause(self, request: PauseRequest) -> dict[str, Any]:
        """Begin or renew. Raises InvalidTask, Conflict, or DrainTimeout: then it is as if it had not been asked for."""
        names = self._named(request.model)
        mine = {n: self._pauses.setdefault(n, _Pause(request.mode)) for n in names}
        if request.mode == "wait":
            await self._drain(mine, request.timeout_seconds)
        for name, pause in mine.items():
            pause.mode = request.mode
            # Whoever asks for less than another was promised shortens nothing.
            pause.until = max(pause.until, time.monotonic() + request.lease_seconds)
            self._watch(name, pause)
        log.info("paused", extra={"models": names, "mode": request.mode, "lease": request.lease_seconds})
        return self.state()

    async def _drain(self, mine: dict[str, _Pause], timeout: float) -> None:
        """Until nothing of these models is in flight. A drain that fails takes with it what is nobody else's."""
        for pause in mine.values():
            pause.drains += 1
        failed = True
        try:
            async with asyncio.timeout(timeout):
                await self._drained(list(mine))
            for name, pause in mine.items():
                if self._pauses.get(name) is not pause:
                    raise Conflict(f"the pause of '{name}' was ended while it drained")
            failed = False
        except TimeoutError as e:
            left = sum(self._in_flight[n] for n in mine)
            raise DrainTimeout(f"{left} generations were still in flight; nothing is paused by this") from e
        finally:
            for name, pause in mine.items():
                pause.drains -= 1
                if failed and not pause.drains and self._pauses.get(name) is pause:
                    if pause.until <= time.monotonic():
                        self._end(name, "its drain failed")
                    else:
                        self._watch(name, pause)

    def resume(self, request: ResumeRequest) -> dict[str, Any]:
        """End a pause; it is no error if there is none. Raises Conflict for another's pause."""
        for name in self._named(request.model):
            pause = self._pauses.get(name)
            if pause is None:
                continue
            if request.pause_id not in (None, pause.id):
                if request.model is None:
                    continue
                raise Conflict(f"'{name}' is paused by {pause.id}, not by {request.pause_id}")
            self._end(name, "resumed")
        return self.state()

    def state(self) -> dict[str, Any]:
        """What GET /pause tells: per model its pause (or none), and how many calls are held and in flight."""
        now, out = time.monotonic(), {}
        for name in self._models:
            pause = self._pauses.get(name)
            shown: dict[str, Any] = {"paused": pause is not None}
            if pause is not None:
                shown |= {
                    "pause_id": pause.id,
                    "mode": pause.mode,
                    "draining": pause.drains > 0,
                    "lease_seconds_left": round(max(0.0, pause.until - now), 3),
                }
            out[name] = shown | {"in_flight": self._in_flight[name], "held": self._held[name]}
        return {"paused": bool(self._pauses), "models": out}

    def close(self) -> None:
        for name in list(self._pauses):
            self._end(name, "the proxy is shutting down")

    def _named(self, model: str | None) -> list[str]:
        if model is None:
            return self._models
        if model not in self._models:
            raise InvalidTask(f"model: unknown '{model}', allowed: {', '.join(self._models)}")
        return [model]

    def _watch(self, name: str, pause: _Pause) -> None:
        if pause.timer is not None:
            pause.timer.cancel()
        pause.timer = asyncio.get_running_loop().call_later(pause.until - time.monotonic(), self._expire, name, pause)

    def _expire(self, name: str, pause: _Pause) -> None:
        if self._pauses.get(name) is pause and not pause.drains:  # else the end of its drain decides
            self.expired += 1
            self._end(name, "its lease ran out")

    def _end(self, name: str, why: str) -> None:
        pause = self._pauses.pop(name)
        if pause.timer is not None:
            pause.timer.cancel()
        pause.ended.set()
        log.info("pause ended", extra={"model": name, "why": why})
