"""The Docker engine's API: one client per process, bounded concurrency, errors as ours."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any, Literal, get_args

import requests
from docker.errors import APIError, DockerException, NotFound

from polar.errors import InfraError, InvalidConfig
from runtimes.docker_client import DEFAULT_TIMEOUT, Client, Slow, connect, within

PARALLEL_VARIABLE = "POLAR_DOCKER_PARALLEL"
# What a call waits for: others of its kind only. Images are pulled and committed, files go up and down; both take minutes.
Lane = Literal["call", "files", "image"]
# Calls at once of one process and lane: more only make the engine slower (docs/runtimes.md has the measurement).
CONCURRENCY = max(4, 2 * (os.cpu_count() or 1))
# Fields of a spec: what they need on Podman, and how Docker says that it keeps them.
_LIMITS = {"memory_mb": "memory", "cpus": "cpu", "pids": "pids"}
_TOLD = {"memory_mb": "MemoryLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}


class Busy(InfraError):
    """No free slot: nothing was asked of the engine."""


class Engine:
    def __init__(self, concurrency: int | None = None):
        most = concurrency or _parallel()
        self._lanes: dict[Lane, threading.BoundedSemaphore] = {
            lane: threading.BoundedSemaphore(most) for lane in get_args(Lane)
        }
        self._lock = threading.Lock()
        self._client: tuple[int, Client] | None = None
        self._podman: bool | None = None
        self._unlimited: tuple[str, ...] | None = None

    @contextlib.contextmanager
    def call(
        self,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        code: str = "exec_failed",
        lane: Lane = "call",
        wait: float | None = None,
    ) -> Iterator[Any]:
        """A client for some calls, each of which is answered, and all that they stream is over, within `timeout` seconds.
        Before that, at most `wait` (default: `timeout`) for a slot of its lane. The engine's `NotFound` passes through;
        everything else is InfraError `code`, which a retry may heal (without a slot: Busy)."""
        slots = self._lanes[lane]
        if not slots.acquire(timeout=max(0.0, timeout if wait is None else wait)):
            raise Busy("the Docker engine is busy", code=code)
        try:
            with within(timeout), translated(code):
                yield self.client()
        finally:
            slots.release()

    def client(self) -> Client:
        with self._lock:
            if self._client is None or self._client[0] != os.getpid():
                self._client = (os.getpid(), connect())
            return self._client[1]

    def is_podman(self) -> bool:
        """Podman behind the same API differs in a few answers."""
        if self._podman is None:
            with self.call(code="runtime_create_failed") as api:
                parts = api.version().get("Components") or []
            self._podman = any("podman" in str(p.get("Name", "")).lower() for p in parts)
        return self._podman

    def podman_host(self) -> dict[str, Any]:
        """What Podman tells of its machine."""
        try:
            with self.call(code="runtime_create_failed") as api:
                told: dict[str, Any] = api._result(api._get(f"{api.base_url}/v4.0.0/libpod/info"), json=True)["host"]
                return told
        except NotFound as e:
            raise InfraError("Podman is older than 4", code="runtime_create_failed", retryable=False) from e

    def unlimited(self) -> tuple[str, ...]:
        """The fields of a spec that it takes and ignores, most for want of control groups: rootless engines on version 1, or
        without delegation. Docker tells so in one place, Podman in another, and each the opposite in the other's."""
        if self._unlimited is None:
            if self.is_podman():
                told = self.podman_host()
                kept = {name: word in (told.get("cgroupControllers") or []) for name, word in _LIMITS.items()}
                kept["open_files"] = not told["security"]["rootless"]  # seen with 4.3
            else:
                with self.call(code="runtime_create_failed") as api:
                    told = api.info()
                kept = {name: told.get(word, True) for name, word in _TOLD.items()}
            self._unlimited = tuple(name for name, yes in kept.items() if not yes)
        return self._unlimited

    def is_local(self) -> bool:
        """Is the engine reached through a socket of this machine? (It may still be a tunnel to another one.)"""
        return self.client().base_url.startswith("http+docker://localhost")

    def is_tls(self) -> bool:
        return self.client().base_url.startswith("https")


def _parallel() -> int:
    text = os.environ.get(PARALLEL_VARIABLE) or str(CONCURRENCY)
    if not text.isdecimal() or int(text) < 1:
        raise InvalidConfig(f"{PARALLEL_VARIABLE}: '{text}' is not a whole number from 1 on")
    return int(text)


@contextlib.contextmanager
def translated(code: str) -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise
    except APIError as e:
        # 400: what was asked for is wrong, and will be.
        raise InfraError(f"Docker engine: {e.explanation or e}", code=code, retryable=e.status_code != 400) from e
    except (Slow, requests.Timeout) as e:
        raise InfraError(f"Docker engine: {e}", code=code) from e
    except (DockerException, requests.RequestException, OSError) as e:
        raise InfraError(f"Docker engine can't be reached: {e}", code=code) from e


def ignore(e: APIError, *statuses: int) -> None:
    """Pass over an error whose HTTP status is among `statuses`, raise any other."""
    if e.status_code not in statuses:
        raise e
