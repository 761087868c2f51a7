"""The engine: a thread that owns the model, and what the event loop may ask of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ApiError
from engine.metrics import Metrics
from engine.model import Model
from engine.options import Options
from engine.request import Request
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from engine.weights import Weights, copy_weights, read_weights

log = logging.getLogger(__name__)


class Engine:
    """A model, its tokenizer and its scheduler, run by one thread.

    All methods belong to the event loop that called `start`; the thread talks back through that loop only.
    """

    def __init__(self, folder: Path, options: Options):
        """Load the model. Raises ModelError."""
        self.folder, self.options = Path(folder), options
        self.model_path = self.folder  # where the present weights came from
        self.tokenizer = Tokenizer(self.folder)
        self.model = Model(self.folder, options.dtype, options.context_length, options.threads)
        self.metrics = Metrics(options.served_name)
        self.scheduler = Scheduler(self.model, self.tokenizer.eos_ids, options, self.metrics)
        self.live: dict[str, Request] = {}
        self.paused = False
        self._arrivals = 0
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._barrier: tuple[int, Callable[[], None]] | None = None
        self._updates = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop
        self._thread = threading.Thread(target=self._run, name="engine-model", daemon=True)

    @property
    def version(self) -> str:
        """The current weight version."""
        return self.scheduler.version

    @property
    def alive(self) -> bool:
        """Whether the model thread runs."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        """Start the model thread; call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self, timeout: float = 1.0) -> bool:
        """Abort everything and stop the thread; False if it was still in a forward pass after `timeout`
        seconds.
        """
        if not self._stopping:
            self._call(lambda: self.scheduler.abort(lambda request: True))
        with self._wake:
            self._stopping = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, timeout)
        return not self._thread.is_alive()

    def submit(self, requests: list[Request], bounded: bool = True) -> None:
        """Queue requests, all or none. Raises ApiError: 503 when the queue is full, 400 for an id that is in
        use.
        """
        if not self.alive:
            raise ApiError("The server is shutting down.", 503)
        pending = sum(1 for request in self.live.values() if request.started is None)
        if bounded and pending + len(requests) > self.options.max_queued + self._free_places():
            raise ApiError("The request queue is full.", 503)
        rids = [request.rid for request in requests]
        taken = {rid for rid in rids if rid in self.live or rids.count(rid) > 1}
        if taken:
            raise ApiError(f"Duplicate request ids: {', '.join(sorted(taken))}.")
        for request in requests:
            self._arrivals += 1
            request.order = self._arrivals
            self.live[request.rid] = request
        self._call(lambda: self.scheduler.waiting.extend(requests))

    def release(self, requests: list[Request]) -> None:
        """The reader is done with these requests; what isn't finished is aborted."""
        unfinished = {request for request in requests if request.view.finish is None}
        for request in requests:
            self.live.pop(request.rid, None)
        if unfinished:
            self._call(lambda: self.scheduler.abort(unfinished.__contains__))

    def abort(self, rid: str, everything: bool) -> None:
        """Abort by id with SGLang's rule: where a live request has this id, all whose ids begin with it."""
        if everything:
            self._call(lambda: self.scheduler.abort(lambda request: request.counted))
        elif rid and any(rid in (request.rid, request.group) for request in self.live.values()):
            self._call(lambda: self.scheduler.abort(lambda request: request.rid.startswith(rid)))

    async def pause(self, mode: str) -> None:
        """Hold generation. abort: finish everything first; retract: drop key/values; in_place: keep all as it
        is.
        """

        def apply() -> None:
            if mode == "abort":
                self.scheduler.abort(lambda request: True)
            elif mode == "retract":
                self.scheduler.retract_all()
            self.paused = True

        await self.command(apply)

    async def resume(self) -> None:
        """Go on after a pause."""

        def apply() -> None:
            self.paused = False

        await self.command(apply)

    async def flush(self) -> bool:
        """Empty the prefix cache; False, and nothing done, while requests run or wait."""

        def apply() -> bool:
            if self.scheduler.running or self.scheduler.waiting:
                return False
            self.scheduler.pool.clear()
            return True

        return await self.command(apply)

    async def set_version(self, version: str) -> None:
        """Change the label that the next tokens get."""
        await self.command(lambda: setattr(self.scheduler, "version", version))

    async def update_weights(self, folder: Path, version: str | None, flush: bool, abort_all: bool) -> int:
        """Replace the weights in place, all or nothing; returns how many requests were held meanwhile.

        As in SGLang: unless generation is paused, requests that arrived before are finished first and later
        ones wait. The prefix cache is always dropped. Requests held by a pause recompute their key/values
        with the new weights if `flush` is set and keep the old ones otherwise. Raises ModelError, with
        everything as it was.
        """
        async with self._updates:
            weights = await asyncio.to_thread(read_weights, folder, self.model.net)
            if abort_all:
                self.abort("", True)
            held = await self._at_barrier(lambda: self._swap(weights, version, flush))
            self.model_path = folder
            return held

    async def command(self, work: Callable[[], Any]) -> Any:
        """Run `work` on the model thread between two steps and return its result."""
        future = self._loop.create_future()
        self._call(lambda: self._answer(future, work))
        return await future

    def _swap(self, weights: Weights, version: str | None, flush: bool) -> int:
        copy_weights(weights, self.model.net)
        scheduler = self.scheduler
        held = len(scheduler.running) + len(scheduler.waiting)
        if flush:
            scheduler.retract_all()
        scheduler.pool.epoch += 1
        scheduler.pool.clear()
        if version is not None:
            scheduler.version = version
        return held

    async def _at_barrier(self, work: Callable[[], Any]) -> Any:
        """Run `work` once everything submitted before is over, or at once while paused."""
        future = self._loop.create_future()
        order = self._arrivals

        def arm() -> None:
            self._barrier = (order, lambda: self._answer(future, work))
            self.scheduler.barrier = order

        self._call(arm)
        return await future

    def _free_places(self) -> int:
        return 0 if self.paused else max(0, self.options.max_running - len(self.scheduler.running))

    def _call(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(work)
            self._wake.notify()

    # From here on: the model thread.

    def _run(self) -> None:
        scheduler = self.scheduler
        while True:
            with self._wake:
                while not self._inbox and not self._stopping and not self._busy():
                    self._wake.wait()
                work = list(self._inbox)
                self._inbox.clear()
                stopping = self._stopping
            try:
                for item in work:
                    item()
                self._pass_barrier()
                if self._busy() and not stopping:
                    scheduler.step()
            except Exception:
                log.exception("the scheduler failed")
                self._fail_all()
            self._publish()
            if stopping:
                return

    def _busy(self) -> bool:
        return not self.paused and bool(self.scheduler.running or self.scheduler.waiting)

    def _pass_barrier(self) -> None:
        if self._barrier is None:
            return
        order, work = self._barrier
        before = any(request.order <= order for request in (*self.scheduler.running, *self.scheduler.waiting))
        if before and not self.paused:
            return
        self._barrier = self.scheduler.barrier = None
        work()

    def _fail_all(self) -> None:
        """A bug in the scheduler must not leave anyone waiting."""
        from engine.scheduler import failure

        scheduler = self.scheduler
        for request in (*scheduler.running, *scheduler.waiting):
            request.kv = None
            request.publish(failure("The scheduler failed; see the server's log."), failed=500)
            scheduler.changed.add(request)
        scheduler.running.clear()
        scheduler.waiting.clear()
        scheduler.pool.clear()
        scheduler.pool.used = 0

    def _publish(self) -> None:
        scheduler = self.scheduler
        scheduler.gauges()
        self.metrics.paused.set(len(scheduler.running) if self.paused else 0)
        changed, scheduler.changed = scheduler.changed, set()

        def tell() -> None:
            for request in changed:
                request.changed.set()

        if changed:
            self._post(tell)

    def _answer(self, future: asyncio.Future, work: Callable[[], Any]) -> None:
        try:
            result, error = work(), None
        except Exception as problem:
            result, error = None, problem

        def deliver() -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self._post(deliver)

    def _post(self, work: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(work)
        except RuntimeError:
            log.debug("the event loop is closed")
