"""A Docker engine behind `ssh://[user@]host[:port][/path/of/its/socket]`, by the system's own ssh program.

The SDK's own way needs paramiko, overrides the port of the user's ssh configuration, and hands out pipes that know neither
timeouts nor `select`. Here each connection is one end of a socket pair whose other end is ssh's input and output.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import subprocess
import tempfile
from typing import Any
from urllib.parse import urlsplit

import requests.adapters
import urllib3
import urllib3.connection

from polar.errors import InvalidConfig

CONNECT_TIMEOUT = 30  # seconds


def command(url: str) -> list[str]:
    """Raises InvalidConfig."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as e:
        raise InvalidConfig(f"DOCKER_HOST: {e}") from e
    if not host or parts.password or parts.query or parts.fragment:
        raise InvalidConfig("DOCKER_HOST: allowed behind ssh:// is [user@]host[:port][/path/of/its/socket]")
    argv = ["ssh", "-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT}"]
    argv += ["-l", parts.username] if parts.username else []
    argv += ["-p", str(port)] if port else []
    engine = ["-H", f"unix://{parts.path}"] if parts.path.strip("/") else []
    return [*argv, "--", host, shlex.join(["docker", *engine, "system", "dial-stdio"])]


class _Socket(socket.socket):
    """Ours of the pair. The program ends with it."""

    def __init__(self, argv: list[str]):
        ours, theirs = socket.socketpair()
        with ours, theirs, contextlib.ExitStack() as failing:
            self._said = failing.enter_context(tempfile.TemporaryFile())
            end = theirs.fileno()
            # A session of its own: the terminal's Ctrl-C is the worker's to handle.
            self._program = subprocess.Popen(argv, stdin=end, stdout=end, stderr=self._said, start_new_session=True)
            failing.pop_all()
            super().__init__(ours.family, ours.type, ours.proto, ours.detach())
        self._heard = False

    def sendall(self, *args: Any) -> None:
        try:
            super().sendall(*args)
        except (BrokenPipeError, ConnectionResetError) as e:
            raise self._failure() from e

    def recv_into(self, *args: Any, **more: Any) -> int:
        try:
            size = super().recv_into(*args, **more)
        except ConnectionResetError:  # it ended without having read all that was sent
            size = 0
        if not size and not self._heard:
            raise self._failure()
        self._heard = True
        return size

    def _failure(self) -> ConnectionError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(5)
        self._said.seek(0)
        text = self._said.read(4096).decode("utf-8", "replace").strip()
        return ConnectionError(text or f"ssh ended with exit code {self._program.poll()}")

    def _real_close(self, *args: Any) -> None:
        """When the last file over this socket is closed too."""
        super()._real_close(*args)  # type: ignore[misc]
        self._program.kill()
        self._program.wait()
        self._said.close()


class _Connection(urllib3.connection.HTTPConnection):
    argv: list[str]

    def connect(self) -> None:
        self.sock = _Socket(self.argv)
        self.sock.settimeout(self.timeout)


class Adapter(requests.adapters.HTTPAdapter):
    def __init__(self, url: str):
        super().__init__()
        self._pool = urllib3.HTTPConnectionPool("localhost", maxsize=10)
        self._pool.ConnectionCls = type("Connection", (_Connection,), {"argv": command(url)})

    def get_connection_with_tls_context(self, *_: Any, **__: Any) -> urllib3.HTTPConnectionPool:
        return self._pool

    def request_url(self, request: requests.PreparedRequest, proxies: Any) -> str:
        return request.path_url

    def close(self) -> None:
        super().close()
        self._pool.close()
