"""JSON in and out: strict reading of bodies and queries, one error envelope."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from polar.codec import from_json, to_json
from polar.errors import InvalidTask, NotFound, PolarError

T = TypeVar("T")

# A session id is a task id (up to 128 characters) and an index.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,139}")

STATUS = {
    "invalid_task": 400,
    "unsupported_spec": 400,
    "invalid_config": 400,
    "invalid_key": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not_found": 404,
    "method_not_allowed": 405,
    "conflict": 409,
    "lease_lost": 409,
    "too_large": 413,
    "too_many": 429,
    "store_unavailable": 503,
}


def reply(data: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(data), status=status, content_type="application/json")


def failure(code: str, message: str, field: str = "", status: int | None = None) -> web.Response:
    error = {"code": code, "message": message}
    if field:
        error["field"] = field
    return reply({"error": error}, status or STATUS.get(code, 500))


def failed(e: PolarError) -> web.Response:
    return failure(e.code, e.message, e.field)


async def body(request: web.Request) -> Any:
    """The parsed JSON body."""
    data = await request.read()
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as e:
        raise InvalidTask(f"body: not valid JSON: {e}") from e


async def read(request: web.Request, typ: type[T], *, empty: bytes = b"") -> T:
    """The body as a struct; an empty body counts as `empty`, where that is given."""
    return from_json(await request.read() or empty, typ, "body")


def ident(request: web.Request, part: str) -> str:
    """The id in the path. What can't be one isn't looked up: it could name another kind of key."""
    text = request.match_info[part]
    if not _NAME.fullmatch(text):
        raise NotFound(f"no {part} '{text[:80]}'")
    return text


def query(request: web.Request, *allowed: str) -> dict[str, str]:
    """The query's parameters; unknown and doubled ones are refused."""
    for key in request.query:
        if key not in allowed:
            raise invalid(key, f"unknown query parameter; allowed: {', '.join(allowed) or 'none'}")
        if len(request.query.getall(key)) > 1:
            raise invalid(key, "given more than once")
    return dict(request.query)


def number(q: dict[str, str], name: str, default: int, low: int, high: int) -> int:
    text = q.get(name, str(default))
    if not text.isascii() or not text.isdigit() or not low <= int(text[:12]) <= high:
        raise invalid(name, f"found '{text[:40]}', allowed: whole number from {low} to {high}")
    return int(text)


def flag(q: dict[str, str], name: str, default: bool) -> bool:
    text = q.get(name, "1" if default else "0")
    if text not in ("0", "1"):
        raise invalid(name, f"found '{text[:40]}', allowed: 0, 1")
    return text == "1"


def invalid(field: str, message: str) -> InvalidTask:
    e = InvalidTask(f"{field}: {message}")
    e.field = field
    return e
