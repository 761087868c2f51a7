"""Listening: the sandbox plane on TCP and a Unix socket, and the admin plane apart from it."""

from __future__ import annotations

import os
from pathlib import Path

from aiohttp import web

from polar.config import Settings
from proxy.admin import Admin, is_loopback
from proxy.gate import Limits
from proxy.http import HEARTBEAT, Front
from proxy.listener import Listener
from proxy.service import Service


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
        self.url = ""
        self.admin_url = ""

    async def start(self) -> None:
        await self.service.start()
        host, port, socket, admin_host, admin_port = self._where
        self.listener = Listener(self._front.handle, self.service.gate.limits.connections)
        runner: web.BaseRunner = web.ServerRunner(self.listener, shutdown_timeout=2.0)
        await runner.setup()
        self._runners.append(runner)
        site = web.TCPSite(runner, host, port, backlog=1024)
        await site.start()
        self.url = _url(host, runner.addresses[0][1])
        if socket:
            Path(socket).parent.mkdir(parents=True, exist_ok=True)
            await web.UnixSite(runner, socket, backlog=1024).start()
            os.chmod(socket, 0o666)  # agents run as any user; the capability is the key, not the file's mode
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

    async def stop(self) -> None:
        """Stop listening, store what is in flight, close."""
        for runner in self._runners:
            for site in list(runner.sites):
                await site.stop()
        await self.service.stop()
        for runner in self._runners:
            await runner.cleanup()
        self._front.close()
        if self._where[2]:
            Path(self._where[2]).unlink(missing_ok=True)


def _url(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
