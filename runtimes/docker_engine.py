"""The Docker engine's API: one client per process, bounded concurrency, errors as ours."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import docker
import requests
from docker.errors import APIError, DockerException, NotFound
from docker.utils import kwargs_from_env

from polar.errors import InfraError

PARALLEL_VARIABLE = "POLAR_DOCKER_PARALLEL"
# Calls at once of one process: more only make the engine slower (docs/runtimes.md has the measurement).
CONCURRENCY = max(4, 2 * (os.cpu_count() or 1))
DEFAULT_TIMEOUT = 60.0


class _Client(docker.APIClient):
    """`timeout` by thread: the SDK reads it anew for each request."""

    _local = threading.local()

    @property
    def timeout(self) -> float:
        return getattr(self._local, "timeout", DEFAULT_TIMEOUT)

    @timeout.setter
    def timeout(self, value: float) -> None:
        pass


class Engine:
    def __init__(self, concurrency: int | None = None):
        wanted = concurrency or int(os.environ.get(PARALLEL_VARIABLE) or CONCURRENCY)
        self._slots = threading.BoundedSemaphore(wanted)
        self._lock = threading.Lock()
        self._client: tuple[int, _Client] | None = None
        self._podman: bool | None = None

    @contextlib.contextmanager
    def call(self, *, timeout: float = DEFAULT_TIMEOUT, code: str = "exec_failed") -> Iterator[Any]:
        """A client for some quick calls. The engine's `NotFound` passes through; everything else is InfraError `code`,
        which a retry may heal."""
        if not self._slots.acquire(timeout=max(0.0, timeout)):
            raise InfraError("the Docker engine is busy", code=code)
        before = getattr(_Client._local, "timeout", DEFAULT_TIMEOUT)
        _Client._local.timeout = max(1.0, timeout)
        try:
            with translated(code):
                yield self.client()
        finally:
            _Client._local.timeout = before
            self._slots.release()

    def client(self) -> _Client:
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                settings = kwargs_from_env()
                # The system's own ssh program: it knows the user's keys and hosts.
                over_ssh = str(settings.get("base_url", "")).startswith("ssh://")
                made = _Client(version="auto", num_pools=4, use_ssh_client=over_ssh, **settings)
                made.get_adapter(made.base_url)
                self._client = (os.getpid(), made)
            return self._client[1]

    def is_podman(self) -> bool:
        """Podman behind the same API differs in a few answers."""
        if self._podman is None:
            parts = self.client().version().get("Components") or []
            self._podman = any("podman" in str(p.get("Name", "")).lower() for p in parts)
        return self._podman

    def is_local(self) -> bool:
        """Is the engine reached through a socket of this machine? (It may still be a tunnel to another one.)"""
        return self.client().base_url.startswith("http+docker://localhost")


@contextlib.contextmanager
def translated(code: str) -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise
    except APIError as e:
        # 400: what was asked for is wrong, and will be.
        raise InfraError(f"Docker engine: {e.explanation or e}", code=code, retryable=e.status_code != 400) from e
    except (DockerException, requests.RequestException, OSError) as e:
        raise InfraError(f"Docker engine can't be reached: {e}", code=code) from e


def ignore(e: APIError, *statuses: int) -> None:
    """Pass over an error whose HTTP status is among `statuses`, raise any other."""
    if e.status_code not in statuses:
        raise e
