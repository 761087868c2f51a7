"""Keeps what a living consumer works on from being delivered again."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("polar.client")


class Holder:
    """Renews the deliveries that are still referenced, every `interval` seconds, from a daemon thread that ends with
    its owner. `renew(ids)` returns 1 or 0 per id; those at 0 belong to somebody else by now."""

    def __init__(self, renew: Callable[[list[str]], list[int]], interval: float):
        self._renew = weakref.WeakMethod(renew)
        self._interval = max(0.05, interval)
        self._held: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, entry: str, delivery: Any) -> None:
        with self._lock:
            self._held[entry] = delivery
            if self._thread is None:
                # The thread knows its owner only weakly: a consumer that is dropped without close() ends it.
                self._thread = threading.Thread(target=self._loop, name="polar-hold", daemon=True)
                self._thread.start()

    def drop(self, entry: str) -> None:
        with self._lock:
            self._held.pop(entry, None)

    def has(self, entry: str) -> bool:
        with self._lock:
            return entry in self._held

    def drain(self) -> list[Any]:
        with self._lock:
            out = list(self._held.values())
            self._held.clear()
            return out

    def stop(self) -> None:
        self._stop.set()

    def _loop(self) -> None:
        while not self._stop.wait(self._interval):
            renew = self._renew()
            if renew is None:
                return
            with self._lock:
                ids = list(self._held.keys())
            if not ids:
                continue
            try:
                for entry, kept in zip(ids, renew(ids), strict=True):
                    if not kept:
                        log.warning("delivery %s went on to another consumer", entry)
                        self.drop(entry)
            except Exception as e:  # Redis away: the next round tries again
                log.warning("renewing %d deliveries: %s", len(ids), e)
            del renew
