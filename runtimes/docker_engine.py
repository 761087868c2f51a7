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

from polar.errors import InfraError, InvalidConfig
from runtimes import docker_ssh

PARALLEL_VARIABLE = "POLAR_DOCKER_PARALLEL"
# Calls at once of one process: more only make the engine slower (docs/runtimes.md has the measurement).
CONCURRENCY = max(4, 2 * (os.cpu_count() or 1))
DEFAULT_TIMEOUT = 60.0
# Fields of a spec: what they need on Podman, and how Docker says that it keeps them.
_LIMITS = {"memory_mb": "memory", "cpus": "cpu", "pids": "pids"}
_TOLD = {"memory_mb": "MemoryLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}


class _Client(docker.APIClient):
    """`timeout` is by thread: the SDK reads it anew for each request."""

    _local = threading.local()

    @property
    def timeout(self) -> float:
        return getattr(self._local, "timeout", DEFAULT_TIMEOUT)

    @timeout.setter
    def timeout(self, value: float) -> None:
        pass

    def merge_environment_settings(self, *args: Any) -> Any:
        # REQUESTS_CA_BUNDLE, for the registries of this machine's packages, would replace the engine's own authority.
        return {**super().merge_environment_settings(*args), "verify": self.verify}


class Engine:
    def __init__(self, concurrency: int | None = None):
        self._slots = threading.BoundedSemaphore(concurrency or _parallel())
        self._lock = threading.Lock()
        self._client: tuple[int, _Client] | None = None
        self._podman: bool | None = None
        self._unlimited: tuple[str, ...] | None = None

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
                self._client = (os.getpid(), _connect())
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


def _connect() -> _Client:
    settings = kwargs_from_env()
    url = str(settings.get("base_url", ""))
    if not url.startswith("ssh://"):
        return _Client(version="auto", num_pools=4, **settings)
    made = _Client(base_url="unix:///ssh", version=docker.constants.DEFAULT_DOCKER_API_VERSION)
    made.base_url = "http+docker://over-ssh"  # not "ssh": the SDK has code of its own for that name
    made.mount(made.base_url, docker_ssh.Adapter(url))
    made._version = made._retrieve_server_version()
    return made


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
