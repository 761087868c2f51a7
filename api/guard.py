"""Around every request: who may ask, errors in one envelope, and how long it took."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import redis
from aiohttp import web
from prometheus_client import Histogram

from api.wire import failed, failure
from polar.errors import PolarError

log = logging.getLogger("polar.api")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
# Without a secret: the page asks for the token itself, and a health probe has none.
OPEN = {"/", "/health"}
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_CODES = {400: "invalid_task", 401: "unauthorized", 404: "not_found", 405: "method_not_allowed", 413: "too_large"}


def auth(token: str, *, local_only: bool) -> Any:
    """Bearer token. Without one, a service on loopback takes only requests that were meant for loopback: a web page
    that points a name of its own at 127.0.0.1, or posts across origins, is refused."""
    wanted = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if token:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if request.path not in OPEN and not hmac.compare_digest(given, wanted):
                reply = failure("unauthorized", "a valid 'Authorization: Bearer <token>' header is needed")
                reply.headers["WWW-Authenticate"] = "Bearer"
                return reply
        elif local_only:
            names = [request.host, urlsplit(request.headers.get("Origin", "http://localhost")).netloc]
            if not all(urlsplit(f"//{n}").hostname in LOOPBACK for n in names):
                return failure("forbidden", "without a token this service answers requests from this machine only")
        return await handler(request)

    return check


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except PolarError as e:
        return failed(e)
    except redis.RedisError as e:
        log.warning("%s %s: %s: %s", request.method, request.path, type(e).__name__, e)
        return failure("store_unavailable", "the session store is away; try again")
    except web.HTTPException as e:
        if e.status < 400:
            raise
        return failure(_CODES.get(e.status, "invalid_task"), e.reason, status=e.status)
    except (ConnectionResetError, ConnectionAbortedError):
        raise  # the client went away
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return failure("internal", "an error of the control plane; its log says more")


def timing(seconds: Histogram) -> Any:
    @web.middleware
    async def measure(request: web.Request, handler: Handler) -> web.StreamResponse:
        start = time.monotonic()
        status = 500
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            # The route's pattern, not the path: ids must not become label values.
            resource = request.match_info.route.resource
            route = resource.canonical if resource else "unknown"
            if route != "/v1/events":
                seconds.labels(route, request.method, str(status)).observe(time.monotonic() - start)

    return measure
