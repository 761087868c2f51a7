"""Reading a request's JSON body: limits, and what JavaScript clients really send."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from aiohttp import web

from proxy import pieces
from proxy.failures import CallError, bad

LIMIT = 32 << 20  # bytes, after decompression: what Anthropic takes, so clients that send many images keep to it
# In one body, at most. Each is an object of some 60 bytes, and what decoding them takes stops all streams. Real requests
# have one in 30 bytes of their schemas and one in hundreds of their text: this many is more than a million tokens.
VALUES = 250_000
READ_SECONDS = 120.0


async def receive(request: web.BaseRequest) -> bytes:
    """The whole body, decompressed. Raises CallError (too_large, bad_request)."""
    if (request.content_length or 0) > LIMIT:
        raise _too_large()
    if (
        request.headers.get("Expect", "").lower() == "100-continue"
    ):  # curl holds back a long body for a second otherwise
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
    try:
        async with asyncio.timeout(READ_SECONDS):
            raw = await request.read()
            request._read_bytes = b""  # it would be kept as long as the answer takes
            return raw
    except web.HTTPRequestEntityTooLarge as e:
        raise _too_large() from e
    except TimeoutError as e:
        raise bad("the request body didn't arrive in time") from e
    except ConnectionError:
        raise
    except Exception as e:  # a broken chunk or a broken compression
        raise bad("the request body can't be read") from e


def decode(raw: bytes) -> dict[str, Any]:
    """The body as an object. Raises CallError (too_large, bad_request)."""
    if len(raw) > VALUES and pieces.values_at_most(raw) > VALUES and pieces.values(raw) > VALUES:
        raise CallError("too_large", f"the body has more than {VALUES} values", code="request_too_large")
    try:
        body = pieces.decode(raw, _leaf)
    except RecursionError as e:
        raise bad("the JSON body is nested too deeply") from e
    except ValueError as e:
        raise bad("the body is not valid JSON") from e
    if not isinstance(body, dict):
        raise bad("the body must be a JSON object")
    return body


def _leaf(raw: bytes | msgspec.Raw) -> Any:
    try:
        return msgspec.json.decode(raw)
    except ValueError:
        text = bytes(raw)
        if b"\\ud" not in text and b"\\uD" not in text:
            raise
    # Half surrogate pairs, as JavaScript writes text that was cut inside an emoji.
    return _whole(json.loads(text, parse_constant=_no_json))


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _whole(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_whole(v) for v in value]
    if isinstance(value, dict):
        return {_whole(k): _whole(v) for k, v in value.items()}
    return value


def _too_large() -> CallError:
    return CallError("too_large", f"the body is larger than {LIMIT >> 20} MiB", code="request_too_large")
