"""What every stage of one worker process shares."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from celery import Celery
from redis.backoff import NoBackoff
from redis.retry import Retry

from polar.config import Settings
from polar.errors import InfraError, LeaseLost, PolarError
from polar.objects import ObjectStore, open_objects
from polar.patience import patiently
from polar.sandbox import (
    LABEL_ATTEMPT,
    LABEL_NAMESPACE,
    LABEL_NODE,
    LABEL_PURPOSE,
    LABEL_SESSION,
    ProxyEndpoint,
)
from polar.session import Session
from polar.store.capture import CaptureStore
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from runtimes.registry import load_runtime
from runtimes.warm import WarmRuntime, WarmRuntimes
from workers.app import make_app
from workers.leases import Held, LeaseKeeper
from workers.scratch import Scratch

T = TypeVar("T")

# A worker that was asked to end while the store is away waits for it no longer than this (seconds).
STOP_PATIENCE = 5.0


class Context:
    """Clients, runtimes and identity of a worker process on `node`."""

    def __init__(self, settings: Settings, node: str):
        self.settings = settings
        self.node = node
        self.worker = f"{node}/{socket.gethostname()}:{os.getpid()}"
        self.stopping = threading.Event()  # the process was asked to end: stages give their sessions back
        self._scratch = Scratch(Path(settings.data_dir).resolve() / "scratch")

    @cached_property
    def app(self) -> Celery:
        return make_app(self.settings)

    @cached_property
    def store(self) -> SessionStore:
        # One pooled client for all threads of the process.
        return SessionStore(connect(self.settings.store_url, max_connections=4096), self.keys)

    @cached_property
    def lively(self) -> SessionStore:
        """The store for signs of life: they rather try again than wait for a server that hangs."""
        limit = min(5.0, max(1.0, self.settings.lease_seconds / 5))
        options = {"socket_timeout": limit, "socket_connect_timeout": limit, "retry": Retry(NoBackoff(), 0)}
        return SessionStore(connect(self.settings.store_url, **options), self.keys)

    @cached_property
    def capture(self) -> CaptureStore:
        return CaptureStore(self.store.redis, self.keys)

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.settings.namespace)

    @cached_property
    def objects(self) -> ObjectStore:
        return open_objects(self.settings.objects_url)

    @cached_property
    def leases(self) -> LeaseKeeper:
        return LeaseKeeper(self.lively, self.settings.lease_seconds)

    @property
    def proxy(self) -> ProxyEndpoint | None:
        if not self.settings.proxy_url:
            return None
        return ProxyEndpoint(url=self.settings.proxy_url, socket=self.settings.proxy_socket or None)

    @cached_property
    def warm(self) -> WarmRuntimes:
        return WarmRuntimes(self.settings, self.store.redis, self.node)

    def runtime(self, backend: str | None) -> WarmRuntime:
        name = backend or self.settings.default_runtime
        return self.warm.over(name, load_runtime(name, self.settings))

    def labels(self, s: Session, purpose: str) -> dict[str, str]:
        return {
            LABEL_NAMESPACE: self.settings.namespace,
            LABEL_NODE: self.node,
            LABEL_SESSION: s.session_id,
            LABEL_ATTEMPT: s.attempt_id,
            LABEL_PURPOSE: purpose,
        }

    @contextmanager
    def held(self, s: Session) -> Iterator[Held]:
        held = self.leases.hold(s.session_id, s.fence)
        try:
            yield held
        finally:
            self.leases.drop(held)

    def persist(self, held: Held, call: Callable[[], T]) -> T:
        """The answer of a call to the store that is safe to repeat, waited for over an outage: an attempt outlives it, since
        its lease does. Raises LeaseLost if the session went on without us, `store_unavailable` if this worker ends."""
        asked = 0.0  # when the worker's end was first noticed

        def stopped() -> bool:
            nonlocal asked
            if self.stopping.is_set():
                asked = asked or time.monotonic()
            return held.lost.is_set() or (asked > 0 and time.monotonic() - asked > STOP_PATIENCE)

        try:
            return patiently(call, None, stopped=stopped)
        except PolarError as e:
            if held.lost.is_set() and e.code == "store_unavailable":
                raise LeaseLost(f"session {held.session_id}: the lease ended while the store was away") from e
            raise

    def folder(self) -> AbstractContextManager[Path]:
        """A private scratch folder on this host."""
        return self._scratch.folder()

    def fetcher(self, folder: Path):
        """Resolve the source of an upload, `object://<key>`, into `folder`. Host paths were uploaded at submission: a
        worker that read its own would hand its files to whoever may submit."""

        def fetch(source: str) -> Path:
            if not source.startswith("object://"):
                raise InfraError(f"source '{source}' is not an object:// key", code="prepare_failed", retryable=False)
            key = source.removeprefix("object://")
            path = folder / key.replace("/", "_")
            if not path.exists():
                self.objects.get_file(key, path)
            return path

        return fetch
