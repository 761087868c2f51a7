"""The Docker SDK's client, with the time limits that it lacks: it reads streams, and pulls, for as long as the engine likes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from typing import Any

import docker
import requests
import urllib3
from docker.errors import DockerException
from docker.utils import kwargs_from_env

from runtimes import docker_ssh

DEFAULT_TIMEOUT = 60.0
STALL = 300.0  # seconds in which nothing comes from the engine: it may be silent while it unpacks a large layer
_LEAST = 1.0


TOO_LONG = "the transfer takes too long"


class Slow(DockerException):
    """It is there, but a stream of it stopped or takes too long."""


class _Limits(threading.local):
    """Of the call that a thread is in."""

    timeout = DEFAULT_TIMEOUT  # seconds for each answer to begin
    deadline = math.inf  # when what is streamed must have ended


_limits = _Limits()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Whatever this thread asks of a client, and streams, takes at most so long."""
    seconds = max(_LEAST, seconds)
    before = _limits.timeout, _limits.deadline
    _limits.timeout, _limits.deadline = seconds, time.monotonic() + seconds
    try:
        yield
    finally:
        _limits.timeout, _limits.deadline = before


class Client(docker.APIClient):
    @property
    def timeout(self) -> float:
        """The SDK reads it anew for each request."""
        return _limits.timeout

    @timeout.setter
    def timeout(self, value: float) -> None:
        pass

    def _set_request_timeout(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        return {**kwargs, "timeout": self.timeout if kwargs.get("timeout") is None else kwargs["timeout"]}

    def _stream_raw_result(self, response: requests.Response, chunk_size: int = 1, decode: bool = True) -> Any:
        self._raise_for_status(response)
        return self._in_time(response, response.iter_content(chunk_size, decode))  # type: ignore[call-overload]

    def _stream_helper(self, response: requests.Response, decode: bool = False) -> Any:
        chunks = super()._stream_helper(response, decode)
        return chunks if decode else self._in_time(response, chunks)  # to decode, the SDK comes here again

    def _in_time(self, response: requests.Response, chunks: Iterator[bytes]) -> Iterator[bytes]:
        """Raises DockerException, and no OSError, which who unpacks the stream would take for one of its own. Once begun it
        leaves no connection behind, however it ends."""
        deadline = _limits.deadline
        fp = response.raw._fp.fp
        try:
            while True:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise Slow(TOO_LONG)
                if sock := fp and fp.raw._sock:  # None once all of it is here: the connection may be another's then
                    sock.settimeout(min(STALL, left))
                chunk = next(chunks, None)
                if chunk is None:
                    return
                yield chunk
        except (requests.RequestException, urllib3.exceptions.HTTPError) as e:
            if "timed out" in str(e):
                raise Slow(TOO_LONG if time.monotonic() >= deadline else f"nothing more came for {STALL:g} s") from e
            raise DockerException(str(e)) from e
        finally:
            response.close()

    def merge_environment_settings(self, *args: Any) -> Any:
        # REQUESTS_CA_BUNDLE, for the registries of this machine's packages, would replace the engine's own authority.
        return {**super().merge_environment_settings(*args), "verify": self.verify}


def connect() -> Client:
    settings = kwargs_from_env()
    url = str(settings.get("base_url", ""))
    if not url.startswith("ssh://"):
        return Client(version="auto", num_pools=4, **settings)
    made = Client(base_url="unix:///ssh", version=docker.constants.DEFAULT_DOCKER_API_VERSION)
    made.base_url = "http+docker://over-ssh"  # not "ssh": the SDK has code of its own for that name
    made.mount(made.base_url, docker_ssh.Adapter(url))
    made._version = made._retrieve_server_version()
    return made
