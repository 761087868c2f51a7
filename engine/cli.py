"""The command line: load a model, bind, serve until a signal."""

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

from engine.errors import ModelError
from engine.options import DTYPES, Options

_GIB = 1 << 30


def parser() -> argparse.ArgumentParser:
    """The options of `python -m engine`."""
    default = Options()
    cli = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    cli.add_argument(
        "--model", required=True, help="smollm2-135m-instruct, tiny-random, or a Hugging Face model folder"
    )
    cli.add_argument("--data-dir", type=Path, default=Path("data/models"), help="where prepared models are kept")
    cli.add_argument("--host", default="127.0.0.1")
    cli.add_argument("--port", type=int, default=0, help="0: any free port")
    cli.add_argument("--port-file", type=Path, help="gets the URL once the server is ready")
    cli.add_argument("--served-model-name", help="id in /v1/models (default: --model)")
    cli.add_argument("--weight-version", default=default.weight_version)
    cli.add_argument("--dtype", choices=DTYPES, default=default.dtype)
    cli.add_argument("--context-length", type=int, help="default: the model's")
    cli.add_argument("--max-running", type=int, default=default.max_running, help="sequences in one batch")
    cli.add_argument("--max-queued", type=int, default=default.max_queued, help="waiting requests before 503")
    cli.add_argument("--prefill-chunk", type=int, default=default.prefill_chunk, help="prompt tokens per step")
    cli.add_argument(
        "--kv-gib",
        type=float,
        default=default.kv_bytes / _GIB,
        help="memory for keys and values, cache included",
    )
    cli.add_argument("--threads", type=int, default=0, help="torch threads (0: choose)")
    cli.add_argument("--incremental-streaming-output", action="store_true", help="stream chunks hold only what is new")
    cli.add_argument("--api-key", default=os.environ.get("POLAR_ENGINE_API_KEY"), help="or POLAR_ENGINE_API_KEY")
    cli.add_argument("--insecure", action="store_true", help="allow a public address without an API key")
    cli.add_argument("--log-level", default="warning")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    args = parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if not args.api_key and not args.insecure and not _loopback(args.host):
        return _fail(f"{args.host} isn't a loopback address: give --api-key (or --insecure, if you mean it)")
    if min(args.max_running, args.prefill_chunk, args.kv_gib) <= 0 or args.max_queued < 0:
        return _fail("--max-running, --prefill-chunk and --kv-gib must be positive, --max-queued not negative")
    if args.port_file:
        args.port_file.unlink(missing_ok=True)  # one of an earlier run would be taken for ours
    try:
        listener = _bind(args.host, args.port)
    except OSError as error:
        return _fail(f"can't listen on {args.host}:{args.port}: {error.strerror or error}")
    options = Options(
        served_name=args.served_model_name or args.model,
        weight_version=args.weight_version,
        dtype=args.dtype,
        context_length=args.context_length,
        max_running=args.max_running,
        max_queued=args.max_queued,
        prefill_chunk=args.prefill_chunk,
        kv_bytes=int(args.kv_gib * _GIB),
        threads=args.threads,
        incremental_stream=args.incremental_streaming_output,
    )
    try:
        from engine.models import prepare

        folder = prepare(args.model, args.data_dir)
        from engine.core import Engine

        engine = Engine(folder, options)
    except ModelError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return 130
    asyncio.run(_serve(engine, listener, args))
    # Everything is answered and closed. A forward pass may still run and can't be interrupted, and taking
    # torch down takes a second by itself: leave both to the operating system.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


async def _serve(engine, listener: socket.socket, args: argparse.Namespace) -> None:
    from aiohttp import web

    from engine.server import create_app

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(
        create_app(engine, args.api_key or None), handler_cancellation=True, access_log=None, shutdown_timeout=0.5
    )
    await runner.setup()
    await web.SockSite(runner, listener).start()
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if args.port_file:
        _write(args.port_file, url + "\n")
    print(f"engine: serving {args.model} ({args.dtype}, context {engine.model.context}) on {url}", flush=True)
    await stop.wait()
    await engine.stop()  # what is in flight answers with what it has
    await runner.cleanup()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    return listener


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _fail(message: str) -> int:
    print(f"engine: {message}", file=sys.stderr)
    return 2
