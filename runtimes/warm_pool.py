"""Idle sandboxes of one back-end in one process: made beside the work, for what was asked for lately."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from msgspec.structs import replace

from polar.errors import PolarError
from polar.ids import new_id
from polar.sandbox import LABEL_PURPOSE, Runtime, Sandbox
from polar.task import RuntimeSpec
from runtimes import warm_shape
from runtimes.warm_ledger import Labels, Ledger
from runtimes.warm_shape import Wish

log = logging.getLogger("polar.warm")

PURPOSE = "warm"
LABEL_OWNER = "polar.warm"  # whose pool an idle sandbox is in

AT_ONCE = 2  # sandboxes in the making, or being removed
CREATE_SECONDS = 120.0
CHECK_SECONDS = 10.0  # for finding one that lives; then a cold one is made
MAX_PAUSE = 60.0
AUDIT_SECONDS = CREATE_SECONDS  # what two audits find is not in the making
REMEMBERED = 4  # requests per sandbox kept: few, so that the pool soon follows tasks to another image

ImageId = Callable[[RuntimeSpec], str | None]


class Idle(NamedTuple):
    sandbox: Sandbox
    image: str
    since: float


class Pool:
    """At most `size` idle sandboxes, none of them older than `seconds`; what wasn't asked for within that time has none."""

    def __init__(self, runtime: Runtime, ledger: Ledger, labels: Labels, size: int, seconds: float, image_id: ImageId):
        self.owner = new_id("warm")
        self.labels = {**labels, LABEL_PURPOSE: PURPOSE, LABEL_OWNER: self.owner}
        self._runtime, self._ledger, self._image_id = runtime, ledger, image_id
        self._size, self._seconds = size, seconds
        self._lock = threading.Lock()
        self._asked: deque[tuple[float, Wish]] = deque(maxlen=max(8, REMEMBERED * size))
        self._idle: dict[str, deque[Idle]] = defaultdict(deque)
        self._making: Counter[str] = Counter()
        self._busy = 0  # cold sandboxes in the making, which somebody waits for
        self._failures = 0
        self._not_before = 0.0
        self._strays: set[str] = set()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._hands = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="warm")
        self._thread: threading.Thread | None = None

    # -- for who wants a sandbox

    def ask(self, wish: Wish) -> None:
        """Say that one like this was wanted."""
        with self._lock:
            self._asked.append((time.monotonic(), wish))
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._tend_forever, name="warm-pool", daemon=True)
                self._thread.start()
        self._wake.set()

    def take(self, wish: Wish, labels: Labels, timeout: float) -> Sandbox | None:
        """One that was just seen alive and carries `labels` from before that on; None: make a cold one."""
        deadline = time.monotonic() + min(timeout, CHECK_SECONDS)
        while not self._stop.is_set() and time.monotonic() < deadline and (found := self._pop(wish.key)):
            try:
                if self._offered(found, wish, labels, deadline):
                    found.sandbox.ref = replace(found.sandbox.ref, labels=labels)
                    return found.sandbox
            except Exception as e:  # the engine's, or Redis's; whoever waits gets a cold one
                log.warning("warm sandbox %s: %s", found.sandbox.ref.handle, e)
            self._discard(found.sandbox)
        return None

    def _offered(self, found: Idle, wish: Wish, labels: Labels, deadline: float) -> bool:
        if found.image != self._image_id(wish.spec):
            return False
        # Before the first command: from here on it is the attempt's, whatever becomes of this process.
        if not self._ledger.adopt(found.sandbox.ref.handle, labels):
            return False
        return found.sandbox.exec(":", timeout=max(0.1, deadline - time.monotonic())).exit_code == 0

    def _pop(self, key: str) -> Idle | None:
        with self._lock:
            return self._idle[key].popleft() if self._idle.get(key) else None

    @contextlib.contextmanager
    def waited_for(self) -> Iterator[None]:
        """While a cold sandbox is made nothing is made in advance."""
        with self._lock:
            self._busy += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy -= 1
            self._wake.set()

    def idle(self, key: str | None = None) -> int:
        with self._lock:
            return len(self._idle.get(key, ())) if key else sum(map(len, self._idle.values()))

    def close(self) -> None:
        """Destroy what is idle. What resists is found by the janitor, for its owner is gone."""
        self._stop.set()
        self._wake.set()
        if self._thread:
            self._thread.join()
        self._hands.shutdown()
        with self._lock:
            left = [i.sandbox for entries in self._idle.values() for i in entries]
            self._idle.clear()
        with ThreadPoolExecutor(4) as hands:
            list(hands.map(self._destroy, left))
        try:
            self._ledger.leave(self.owner)
        except Exception as e:  # the signature runs out by itself
            log.warning("warm pool of '%s': %s", self._runtime.name, e)

    # -- beside the work

    def _tend_forever(self) -> None:
        signed = audited = float("-inf")
        while not self._stop.is_set():
            self._wake.clear()
            now = time.monotonic()
            try:
                if now - signed > self._ledger.seconds / 3:
                    self._ledger.sign(self.owner)
                    signed = now
                self._tend(now)
                if now - audited > AUDIT_SECONDS:
                    self._hands.submit(self._audit)
                    audited = now
            except Exception as e:  # Redis is away: no signature, so nothing is made
                log.warning("warm pool of '%s': %s", self._runtime.name, e)
            self._wake.wait(min(1.0, self._ledger.seconds / 3))

    def _tend(self, now: float) -> None:
        with self._lock:
            while self._asked and self._asked[0][0] < now - self._seconds:
                self._asked.popleft()
            wishes = {w.key: w for _, w in self._asked}
            wanted = warm_shape.shares(Counter(w.key for _, w in self._asked), self._size)
            surplus = [i.sandbox for key in list(self._idle) for i in self._surplus(key, wanted.get(key, 0), now)]
            todo: list[Wish] = []
            if now >= self._not_before and not self._busy:
                for key, n in wanted.items():
                    while self._making.total() < AT_ONCE and len(self._idle[key]) + self._making[key] < n:
                        self._making[key] += 1
                        todo.append(wishes[key])
        for sandbox in surplus:
            self._discard(sandbox)
        for w in todo:
            self._hands.submit(self._make, w)

    def _surplus(self, key: str, wanted: int, now: float) -> Iterator[Idle]:
        entries = self._idle[key]
        while entries and (len(entries) > wanted or entries[0].since < now - self._seconds):
            yield entries.popleft()
        if not entries:
            del self._idle[key]

    def _make(self, w: Wish) -> None:
        made: Sandbox | None = None
        try:
            if self._stop.is_set() or (image := self._image_id(w.spec)) is None:
                return
            made = self._runtime.create(w.spec, labels=self.labels, proxy=w.proxy, timeout=CREATE_SECONDS)
            again = warm_shape.wish(w.spec, w.proxy)
            # An image or a mounted folder may have been replaced meanwhile.
            same = again is not None and again.key == w.key and self._image_id(w.spec) == image
            with self._lock:
                if same and not self._stop.is_set():
                    self._idle[w.key].append(Idle(made, image, time.monotonic()))
                    made = None
                self._failures, self._not_before = 0, 0.0
        except Exception as e:
            self._failed(w, e)
        finally:
            if made:
                self._destroy(made)
            with self._lock:
                self._making -= Counter([w.key])
            self._wake.set()

    def _failed(self, w: Wish, e: Exception) -> None:
        """Twice the pause each time; what can't work is not tried again until it is asked for again."""
        with self._lock:
            pause = min(MAX_PAUSE, 2.0**self._failures)
            self._failures = min(self._failures + 1, 10)
            self._not_before = time.monotonic() + pause
            if not getattr(e, "retryable", True):
                self._asked = deque(((t, x) for t, x in self._asked if x.key != w.key), self._asked.maxlen)
        log.warning("no warm sandbox on '%s', none for %.0f s: %s", self._runtime.name, pause, e)

    def _discard(self, sandbox: Sandbox) -> None:
        try:
            self._hands.submit(self._destroy, sandbox)
        except RuntimeError:  # the pool was closed
            self._destroy(sandbox)

    def _destroy(self, sandbox: Sandbox) -> None:
        try:
            sandbox.destroy()
        except PolarError as e:
            log.warning("warm sandbox %s can't be removed: %s", sandbox.ref.handle, e)

    def _audit(self) -> None:
        """Remove what carries this pool's label and isn't in it: half-made ones, and those that could not be removed."""
        try:
            found = {ref.handle: ref for ref in self._runtime.list(self.labels)}
            with self._lock:
                known = {i.sandbox.ref.handle for entries in self._idle.values() for i in entries}
            for handle in self._strays & found.keys() - known:
                if self._ledger.condemn(handle):
                    self._destroy(self._runtime.attach(found[handle]))
            self._strays = found.keys() - known
        except Exception as e:
            log.warning("warm pool of '%s': %s", self._runtime.name, e)
