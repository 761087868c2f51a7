"""Files for prepare steps: bytes in, `object://uploads/<sha256>` out."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from aiohttp import web

from api.control import Control, control
from api.wire import query, reply
from polar.errors import PolarError
from submission.uploads import SCHEME

CHUNK = 1 << 20


def routes() -> list[web.RouteDef]:
    return [web.put("/v1/uploads", upload)]


async def upload(request: web.Request) -> web.Response:
    """The body is streamed to a file first: its name is its content's digest, so a repeat changes nothing."""
    query(request)
    c = control(request)
    if (request.content_length or 0) > c.upload_limit:
        raise _too_large(c)
    digest, size = hashlib.sha256(), 0
    with tempfile.NamedTemporaryFile(prefix="polar-upload-") as f:
        async for chunk in request.content.iter_chunked(CHUNK):
            size += len(chunk)
            if size > c.upload_limit:
                raise _too_large(c)
            digest.update(chunk)
            await c.call(f.write, chunk)
        f.flush()
        key = f"uploads/{digest.hexdigest()}"
        await c.call(_keep, c, key, Path(f.name))
    return reply({"source": SCHEME + key, "sha256": digest.hexdigest(), "size": size}, 201)


def _keep(c: Control, key: str, path: Path) -> None:
    if not c.objects.exists(key):
        c.objects.put_file(key, path)


def _too_large(c: Control) -> PolarError:
    return PolarError(f"body: allowed are at most {c.upload_limit} bytes", code="too_large")
