"""Renewal of the leases that this process holds: one thread, one script call per round."""

from __future__ import annotations

import logging
import threading
from typing import Any

from polar.store.sessions import SessionStore

log = logging.getLogger("polar.leases")


class Held:
    """One session in work. `lost`: stop and write nothing. `cancel`: its end is wanted."""

    def __init__(self, session_id: str, fence: int):
        self.session_id = session_id
        self.fence = fence
        self.lost = threading.Event()
        self.cancel = threading.Event()


class LeaseKeeper:
    def __init__(self, store: SessionStore, lease: float):
        self.store = store
        self.lease = lease
        self._held: dict[tuple[str, int], Held] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, session_id: str, fence: int) -> Held:
        held = Held(session_id, fence)
        with self._lock:
            self._held[session_id, fence] = held
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="leases", daemon=True)
                self._thread.start()
        return held

    def drop(self, held: Held) -> None:
        with self._lock:
            self._held.pop((held.session_id, held.fence), None)

    def close(self) -> None:
        self._stop.set()

    def _loop(self) -> None:
        pause = self.lease / 3
        while not self._stop.wait(pause):
            with self._lock:
                held = list(self._held.values())
            try:
                self._renew(held)
                pause = self.lease / 3
            except Exception as e:  # Redis away: when it is back, what is left of the leases may be little
                log.warning("lease renewal failed: %s", e)
                pause = min(1.0, self.lease / 10)

    def _renew(self, held: list[Held]) -> None:
        for i in range(0, len(held), 500):
            part = held[i : i + 500]
            replies: list[Any] = self.store.renew([(h.session_id, h.fence) for h in part], self.lease)
            for h, reply in zip(part, replies, strict=True):
                if reply == 0:
                    h.lost.set()
                elif reply == 2:
                    h.cancel.set()
