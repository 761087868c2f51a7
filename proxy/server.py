"""Listening: the sandbox plane on TCP and a Unix socket, and the admin plane apart from it."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from aiohttp import web

from polar.config import Settings
from proxy.admin import Admin, is_loopback
from proxy.gate import Limits
from proxy.http import HEARTBEAT, Front
from proxy.listener import Listener
from proxy.service import Service

STOP_SECONDS = 6.0  # `polar up` kills what hasn't ended after 10


class Server:
    """A running proxy. `url` and `admin_url` are known after start()."""

    def __init__(
        self,
        settings: Settings,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        socket: str = "",
        admin_host: str = "127.0.0.1",
        admin_port: int | None = None,
        heartbeat: float = HEARTBEAT,
        limits: Limits | None = None,
    ):
        self.service = Service(settings, limits)
        self._front = Front(self.service, heartbeat)
        self._where = (host, port, socket, admin_host, admin_port)
        self._runners: list[web.BaseRunner] = []
        self._socket: tuple[int, int] | None = None  # ours
        self.url = ""
        self.admin_url = ""

    async def start(self) -> None:
        await self.service.start()
        host, port, socket, admin_host, admin_port = self._where
        self.listener = Listener(self._front.handle, self.service.gate.limits.connections)
        runner: web.BaseRunner = web.ServerRunner(self.listener)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        self.url = _url(host, runner.addresses[0][1])
        if admin_port is not None:
            settings = self.service.settings
            token = os.environ.get(settings.api_token_env, "").strip()
            plane = Admin(self.service, token, settings.api_token_env, public=not is_loopback(admin_host))
            admin = web.AppRunner(plane.app(), handler_cancellation=True, access_log=None)
            await admin.setup()
            self._runners.append(admin)
            admin_site = web.TCPSite(admin, admin_host, admin_port)
            await admin_site.start()
            self.admin_url = _url(admin_host, admin.addresses[0][1])
        if socket:  # last: it takes the place of a running proxy's, so nothing may fail behind it
            self._socket = await _take(Path(socket), runner)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop listening, store what is in flight, close: in so many seconds."""
        # While it is listened on, no other file can have its identity.
        if self._socket is not None and _identity(Path(self._where[2])) == self._socket:
            Path(self._where[2]).unlink(missing_ok=True)
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        self.listener.close_idle()
        await self.service.stop(seconds * 0.75)
        # Twice that long: to end by itself, and to end when cancelled.
        await asyncio.gather(*(r.server.shutdown(seconds / 12) for r in self._runners if r.server is not None))
        for runner in self._runners:
            await runner.cleanup()
        self._front.close()


async def _take(path: Path, runner: web.BaseRunner) -> tuple[int, int]:
    """Listen on a Unix socket, and only then put it in its place, so that a predecessor's clients are never refused. Returns
    the socket's identity. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_socket():
        raise FileExistsError(f"{path} is there and isn't a socket")
    part = path.with_name(f".{secrets.token_hex(3)}")
    try:
        await web.UnixSite(runner, str(part), backlog=1024).start()
        os.chmod(part, 0o666)  # agents run as any user; the capability is the key, not the file's mode
        identity = _identity(part)
        assert identity is not None
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return identity


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode: whether a file is still the one that it was."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _url(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
