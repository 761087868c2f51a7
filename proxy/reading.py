"""From the bytes of a body to a neutral request."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from proxy import body, pieces, provenance
from proxy.dialects.base import Call, Cited, Citing, Dialect, Recalled
from proxy.failures import bad
from proxy.neutral import Request

# What is longer (bytes), or has more values, is read in a thread, lest the streams stand still.
INLINE = 1 << 20
INLINE_VALUES = 60_000

Recall = Callable[[Cited], Awaitable[Recalled]]


class Reading:
    """Long bodies are read one after the other: in many threads at once they would leave the loop no time, either."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read")

    async def request(self, raw: bytes, dialect: Dialect, call: Call, recall: Recall) -> Request:
        """Raises CallError (too_large, bad_request, and what `recall` does)."""
        loop, short = asyncio.get_running_loop(), _short(raw)
        sent, cited = _read(raw, dialect) if short else await loop.run_in_executor(self._thread, _read, raw, dialect)
        if cited is not None:
            call = msgspec.structs.replace(call, recalled=await recall(cited))
        if short:
            return _request(sent, dialect, call)
        return await loop.run_in_executor(self._thread, _request, sent, dialect, call)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _short(raw: bytes) -> bool:
    return len(raw) <= INLINE and (len(raw) <= INLINE_VALUES or pieces.values_at_most(raw) <= INLINE_VALUES)


def _read(raw: bytes, dialect: Dialect) -> tuple[dict[str, Any], Cited | None]:
    sent = body.decode(raw)
    return sent, dialect.cites(sent) if isinstance(dialect, Citing) else None


def _request(sent: dict[str, Any], dialect: Dialect, call: Call) -> Request:
    try:
        request = dialect.parse(sent, call)
        provenance.mark(request, call.headers, sent)
    except (RecursionError, OverflowError, UnicodeError, msgspec.MsgspecError) as e:
        raise bad("the request is nested too deeply, or has a number or a character that can't be kept") from e
    if len(request.identity) > INLINE:  # what is hashed on the loop must be short
        request.identity = hashlib.blake2b(request.identity, digest_size=32).digest()
    return request
