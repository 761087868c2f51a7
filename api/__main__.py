"""`python -m api`: the control plane as a process."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from aiohttp import web

from api.app import make_app
from api.control import Control
from polar.config import Settings, load
from polar.errors import InvalidConfig, PolarError


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load(args.config)
        if not settings.store_url:
            raise InvalidConfig("broker: not set; give POLAR_BROKER or a line in polar.toml")
        token = read_token(settings, args.host, args.insecure)
        control = Control(settings, upload_limit=args.upload_limit_mb << 20)
        asyncio.run(serve(control, token, args))
    except PolarError as e:
        print(f"polar: {e.message}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"polar: {args.host}:{args.port}: {e}", file=sys.stderr)
        return 2
    return 0


def read_token(settings: Settings, host: str, insecure: bool) -> str:
    """The secret, or "" on loopback. Raises InvalidConfig for a public address without one."""
    token = os.environ.get(settings.api_token_env, "").strip()
    if not token and not insecure and not is_loopback(host):
        raise InvalidConfig(
            f"host: {host} is not loopback and {settings.api_token_env} is not set; "
            "set it to a secret, or say --insecure if something else guards this port"
        )
    return token


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def serve(control: Control, token: str, args: argparse.Namespace) -> None:
    app = make_app(control, token, local_only=not args.insecure)
    # Access logs would only repeat the metrics.
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((args.host, args.port))
        await web.SockSite(runner, sock).start()
        host = f"[{args.host}]" if ":" in args.host else args.host
        url = f"http://{host}:{sock.getsockname()[1]}"
        if args.port_file:
            tmp = Path(f"{args.port_file}.tmp")
            tmp.write_text(url)
            os.replace(tmp, args.port_file)
        logging.getLogger("polar.api").info("control plane on %s%s", url, "" if token else " (no token)")
        stop = asyncio.Event()
        for s in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(s, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m api", description=__doc__)
    p.add_argument("--config")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=0, help="0 picks a free one")
    p.add_argument("--port-file", help="the service's URL is written here when it listens")
    p.add_argument("--insecure", action="store_true", help="listen on a public address without a token")
    p.add_argument("--upload-limit-mb", type=int, default=1024)
    p.add_argument("--log-level", default="info")
    return p.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
