"""A service that nobody in a sandbox should reach: it writes down who does."""

from __future__ import annotations

import socketserver
import threading
from http.server import BaseHTTPRequestHandler
from typing import Any


class Listener:
    """Requests that came in, by port or by Unix socket."""

    def __init__(self, socket_path: str | None = None):
        self.seen: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_one_request(self) -> None:
                self.raw_requestline = self.rfile.readline(4096)
                line = self.raw_requestline.decode("latin-1").split()
                outer.seen.append(line[1] if len(line) > 1 else "?")
                self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                self.close_connection = True

        class Tcp(socketserver.ThreadingTCPServer):
            daemon_threads = allow_reuse_address = True

        class Unix(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

        self.servers: list[Any] = [Tcp(("0.0.0.0", 0), Handler)]
        self.port = self.servers[0].server_address[1]
        if socket_path:
            self.servers.append(Unix(socket_path, Handler))
        for server in self.servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()
