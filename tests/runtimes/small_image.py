"""An image of a few megabytes that runs (a shell, its libraries), as an archive and in a registry of a page."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = ("bin/sh", "bin/dash", "bin/cat", "bin/env", "bin/ls", "bin/true", "bin/id", "bin/chown", "bin/sleep")
LIBRARIES = ("libc.", "ld-linux", "libselinux", "libpcre2", "libcap", "libacl", "libattr")


class Image(NamedTuple):
    config: bytes
    layer: bytes


def build(base: Path) -> Image:
    """Out of the files of an unpacked Debian."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in ("bin", "lib", "lib64"):
            tar.add(base / name, arcname=name, recursive=False)
        for program in PROGRAMS:
            tar.add(os.path.realpath(base / program), arcname=f"usr/{program}")
        for lib in (base / "usr/lib/x86_64-linux-gnu").glob("l*.so.*"):
            if lib.name.startswith(LIBRARIES):
                tar.add(os.path.realpath(lib), arcname=f"usr/lib/x86_64-linux-gnu/{lib.name}")
        tar.add(os.path.realpath(base / "lib64/ld-linux-x86-64.so.2"), arcname="usr/lib64/ld-linux-x86-64.so.2")
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin", "GREETING=hello there"], "WorkingDir": "/made/here"},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()]},
    }
    return Image(json.dumps(config).encode(), layer.getvalue())


def save(image: Image, path: Path, tag: str = "small:latest") -> None:
    """As `docker save` writes it."""
    name = hashlib.sha256(image.config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": [tag], "Layers": ["layer.tar"]}]
    members = {"manifest.json": json.dumps(manifest).encode(), name: image.config, "layer.tar": image.layer}
    with tarfile.open(path, "w") as tar:
        for member, content in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    path.chmod(0o644)


class Registry(ThreadingHTTPServer):
    """Serves one image as `private/small:1`, to who knows the account. `seen` are the paths asked for with it."""

    daemon_threads = True
    account = ("alice", "s3cret")

    def __init__(self, image: Image):
        layer = gzip.compress(image.layer, 1)
        self.blobs = {_digest(image.config): image.config, _digest(layer): layer}
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        part = "application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar.gzip"
        described = [
            {"mediaType": m, "size": len(b), "digest": _digest(b)}
            for m, b in zip(part, (image.config, layer), strict=True)
        ]
        self.manifest = json.dumps(
            {"schemaVersion": 2, "mediaType": kind, "config": described[0], "layers": described[1:]}
        ).encode()
        self.kind, self.seen = kind, []  # type: ignore[var-annotated]
        super().__init__(("127.0.0.1", 0), _Handler)
        self.host = f"127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        user, password = self.server.account
        wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        if self.headers.get("Authorization") != wanted:
            return self._answer(401, b"{}", "application/json", {"WWW-Authenticate": 'Basic realm="private"'})
        self.server.seen.append(self.path)
        manifest = self.server.manifest
        if self.path == "/v2/":
            return self._answer(200, b"{}", "application/json")
        if self.path in (f"/v2/private/small/manifests/{t}" for t in ("1", _digest(manifest))):
            return self._answer(200, manifest, self.server.kind, {"Docker-Content-Digest": _digest(manifest)})
        if blob := self.server.blobs.get(self.path.rpartition("/")[2]):
            return self._answer(200, blob, "application/octet-stream")
        error = {"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}
        return self._answer(404, json.dumps(error).encode(), "application/json")

    do_HEAD = do_GET

    def _answer(self, status: int, body: bytes, kind: str, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass
