"""The least a reverse proxy can do in aiohttp: pass a request on and stream the answer back. `python -m benchmarks.null_proxy
--target URL --port-file F`. It is what the proxy's latency is compared with. With `--store URL` it also asks a Redis before
the request goes on and before the answer's last piece goes out, in scripts that do nothing: what any proxy must do that
serves no ended session and never tells of an answer that isn't stored."""

from __future__ import annotations

import argparse
from pathlib import Path

import aiohttp
from aiohttp import web

from polar.store.connection import connect_async


def app(target: str, store: str = "") -> web.Application:
    application = web.Application(client_max_size=256 << 20)
    ask = connect_async(store).register_script("return 1") if store else None

    async def session(_: web.Application):
        async with aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=0)) as http:
            application[_HTTP] = http
            yield

    async def forward(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if ask is not None:
            await ask()
        headers = {"Content-Type": request.content_type}
        async with application[_HTTP].request(
            request.method, target + request.path, data=body, headers=headers
        ) as upstream:
            response = web.StreamResponse(status=upstream.status, headers={"Content-Type": upstream.content_type})
            await response.prepare(request)
            last = b""
            async for chunk in upstream.content.iter_any():
                if ask is None:
                    await response.write(chunk)
                elif last:
                    await response.write(last)
                last = chunk
            if ask is not None:
                await ask()
                await response.write(last)
            await response.write_eof()
            return response

    application.cleanup_ctx.append(session)
    application.router.add_route("*", "/{path:.*}", forward)
    return application


_HTTP: web.AppKey[aiohttp.ClientSession] = web.AppKey("http", aiohttp.ClientSession)


def serve(application: web.Application, port_file: Path) -> None:
    """Serve on a free loopback port, its URL written to `port_file`, until a signal."""

    async def announce(_: web.Application) -> None:
        part = port_file.with_suffix(".part")
        part.write_text(f"http://127.0.0.1:{sock.getsockname()[1]}", encoding="utf-8")
        part.replace(port_file)

    import socket

    sock = socket.create_server(("127.0.0.1", 0), backlog=2048)
    application.on_startup.append(announce)
    web.run_app(application, sock=sock, print=None, access_log=None, backlog=2048)


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--target", required=True)
    cli.add_argument("--store", default="")
    cli.add_argument("--port-file", type=Path, required=True)
    options = cli.parse_args()
    serve(app(options.target, options.store), options.port_file)
