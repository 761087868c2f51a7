"""Listeners inside sandboxes' networks that this process serves: one per sandbox, for as long as a command needs it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator

from polar.errors import InfraError
from polar.sandbox import ProxyEndpoint
from runtimes.forward import PORT, Forward, forwarder


class _Open:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.forward: Forward | None = None


_lock = threading.Lock()
_open: dict[Hashable, _Open] = {}


@contextlib.contextmanager
def opened(key: Hashable, listen: Callable[[], socket.socket], proxy: ProxyEndpoint) -> Iterator[None]:
    """`listen` opens the listener (OSError); `key` names the network it is in: a sandbox's restart makes a new one.
    Raises InfraError `exec_failed`."""
    key = (os.getpid(), key)
    with _lock:
        entry = _open.setdefault(key, _Open())
        entry.users += 1
    try:
        with entry.lock:
            if entry.forward is None:
                try:
                    entry.forward = forwarder().serve(listen(), proxy)
                except OSError as e:
                    why = f"port {PORT} inside is taken" if e.errno == errno.EADDRINUSE else str(e)
                    raise InfraError(f"can't bring the proxy inside: {why}", code="exec_failed") from e
        yield
    finally:
        with _lock:
            entry.users -= 1
            last = entry.users == 0
            if last:
                del _open[key]
        if last and entry.forward is not None:
            entry.forward.close()
