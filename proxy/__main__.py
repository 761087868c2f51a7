"""`python -m proxy`: serve until SIGTERM or SIGINT, then store what is in flight and exit."""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import uvloop

from polar import descriptors
from polar.config import Settings, load
from polar.errors import PolarError
from proxy import logs
from proxy.gate import Limits
from proxy.server import STOP_SECONDS, Server, write_atomically


def main() -> int:
    cli = argparse.ArgumentParser(prog="python -m proxy", description=__doc__)
    cli.add_argument("--config", help="polar.toml")
    cli.add_argument("--host", default="127.0.0.1")
    cli.add_argument("--port", type=int, default=0, help="0: any free port")
    cli.add_argument("--socket", default="", help="also listen on this Unix socket, in place of whoever does")
    cli.add_argument("--port-file", type=Path, help="gets the URL once the proxy is ready")
    cli.add_argument("--admin-host", default="127.0.0.1")
    cli.add_argument("--admin-port", type=int, help="/health and /metrics; off unless given (0: any free port)")
    cli.add_argument("--admin-port-file", type=Path, help="gets the admin URL")
    cli.add_argument("--log-level", default="INFO", choices=["DEBUG", "INFO", "WARNING", "ERROR"])
    cli.add_argument("--log-prompts", action="store_true", help="write conversations to the log: off, they never are")
    cli.add_argument("--max-calls", type=int, default=Limits().calls, help="open at once")
    cli.add_argument(
        "--max-calls-per-session", type=int, default=Limits().calls_per_attempt, help="open at once in one session"
    )
    cli.add_argument(
        "--stop-seconds",
        type=float,
        default=STOP_SECONDS,
        help="from SIGTERM to the end at most; what kills it waits longer",
    )
    args = cli.parse_args()
    if not args.stop_seconds > 0:
        cli.error(f"--stop-seconds: found {args.stop_seconds:g}, allowed: more than 0")
    logs.configure(args.log_level, args.log_prompts)
    sys.setswitchinterval(0.001)  # a long prompt being rendered in its thread holds up the streams less
    try:
        return uvloop.run(_serve(load(args.config), args))
    except PolarError as e:
        print(f"error: {e.message}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: can't listen: {e}", file=sys.stderr)
        return 1


async def _serve(settings: Settings, args: argparse.Namespace) -> int:
    server = Server(
        settings,
        host=args.host,
        port=args.port,
        socket=args.socket,
        admin_host=args.admin_host,
        admin_port=args.admin_port,
        limits=Limits(
            calls=args.max_calls,
            calls_per_attempt=args.max_calls_per_session,
            connections=descriptors.raise_limit() * 3 // 5,
        ),
    )
    stop = asyncio.Event()
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, stop.set)
    await server.start()
    gc.collect()
    gc.freeze()  # what the libraries loaded stays; walking it again would stop every stream
    gc.set_threshold(20_000, 20, 50)  # hardly anything here is cyclic, and every pass stops every stream
    for path, url in ((args.admin_port_file, server.admin_url), (args.port_file, server.url)):
        if path is not None and url:
            write_atomically(path, url)
    await stop.wait()
    await server.stop(args.stop_seconds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
