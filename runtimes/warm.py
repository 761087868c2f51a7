"""Warm sandboxes: made before they are asked for, on any back-end, and unknown to it.

Off unless `warm_sandboxes` says otherwise. Which ones to keep is learnt from what was asked for lately, not configured: then
they are equal to what tasks ask for by construction, follow the tasks to other images, and vanish when nobody asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from polar.config import Settings
from polar.sandbox import LABEL_NAMESPACE, LABEL_NODE, LABEL_PURPOSE, ProxyEndpoint, Runtime, Sandbox, SandboxRef
from polar.store.keys import Keys
from polar.task import RuntimeSpec
from runtimes.warm_image import image_id
from runtimes.warm_ledger import Labels, Ledger
from runtimes.warm_pool import LABEL_OWNER, PURPOSE, Pool
from runtimes.warm_shape import wish

# Their sandboxes are made in some 30 ms: nothing worth keeping any for (docs/runtimes.md has the measurement).
CHEAP = ("local",)


class WarmRuntime:
    """A back-end whose `create` may hand out a sandbox that was made before, and whose `list` tells whose it is now.
    Without a pool it only tells."""

    def __init__(self, inner: Runtime, ledger: Ledger, labels: Labels, pool: Pool | None):
        self.name = inner.name
        self.pool = pool
        self._inner, self._ledger = inner, ledger
        self._warm = {**labels, LABEL_PURPOSE: PURPOSE}

    @property
    def inner(self) -> Runtime:
        return self._inner

    def check(self, spec: RuntimeSpec) -> None:
        self._inner.check(spec)

    def available(self) -> tuple[bool, str]:
        return self._inner.available()

    def create(self, spec: RuntimeSpec, *, labels: Labels, proxy: ProxyEndpoint | None, timeout: float) -> Sandbox:
        if self.pool is None:
            return self._inner.create(spec, labels=labels, proxy=proxy, timeout=timeout)
        self._inner.check(spec)
        begun = time.monotonic()
        wanted = wish(spec, proxy)
        if wanted and (found := self.pool.take(wanted, labels, timeout)):
            self.pool.ask(wanted)
            return found
        left = max(0.1, timeout - (time.monotonic() - begun))
        with self.pool.waited_for():
            if wanted:
                self.pool.ask(wanted)
            return self._inner.create(spec, labels=labels, proxy=proxy, timeout=left)

    def attach(self, ref: SandboxRef) -> Sandbox:
        return self._inner.attach(ref)

    def list(self, labels: Labels) -> list[SandboxRef]:
        """Handed out ones under their new labels, condemned ones without an owner."""
        records = self._ledger.records()
        found = [ref for ref in self._inner.list(labels) if ref.handle not in records]
        if records:
            for ref in self._inner.list(self._warm):
                if (record := records.get(ref.handle)) is not None:
                    told = record or {k: v for k, v in ref.labels.items() if k != LABEL_OWNER}
                    if labels.items() <= told.items():
                        found.append(replace(ref, labels=told))
        return found

    # -- for the janitor

    def lives(self, owner: str) -> bool:
        return self._ledger.lives(owner)

    def condemn(self, handle: str) -> bool:
        """Before an idle sandbox is removed. False: it was handed out meanwhile."""
        return self._ledger.condemn(handle)

    def tidy(self, seen: set[str], alive: Callable[[Labels], bool]) -> None:
        """Forget the records of sandboxes that are not among the `seen`, unless somebody `alive` has them."""
        gone = (h for h, labels in self._ledger.records().items() if h not in seen and not (labels and alive(labels)))
        self._ledger.forget(gone)


class WarmRuntimes:
    """The warm back-ends of one worker process."""

    def __init__(self, settings: Settings, client: Any, node: str):
        self._settings, self._client, self._node = settings, client, node
        self._labels = {LABEL_NAMESPACE: settings.namespace, LABEL_NODE: node}
        self._lock = threading.Lock()
        self._made: dict[str, WarmRuntime] = {}

    def over(self, name: str, inner: Runtime) -> WarmRuntime:
        with self._lock:
            if name not in self._made:
                self._made[name] = self._make(name, inner)
            return self._made[name]

    def _make(self, name: str, inner: Runtime) -> WarmRuntime:
        s = self._settings
        ledger = Ledger(self._client, Keys(s.namespace), self._node, inner.name, s.node_timeout_seconds)
        pool = None
        if s.warm_sandboxes and inner.name not in CHEAP:
            ask = partial(image_id, inner, s)
            pool = Pool(inner, ledger, self._labels, s.warm_sandboxes, s.warm_seconds, ask)
        return WarmRuntime(inner, ledger, self._labels, pool)

    def close(self) -> None:
        """Destroy all idle ones: for the end of the process."""
        for runtime in self._made.values():
            if runtime.pool:
                runtime.pool.close()
