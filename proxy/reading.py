"""From the bytes of a body to a neutral request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import msgspec

from proxy import body, provenance
from proxy.dialects.base import Call, Dialect
from proxy.failures import bad
from proxy.neutral import Request

INLINE = 1 << 20  # bytes; what is longer is read in a thread, lest the streams stand still


class Reading:
    """Long bodies are read one after the other: in many threads at once they would leave the loop no time, either."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="read")

    async def request(self, raw: bytes, dialect: Dialect, call: Call) -> Request:
        """Raises CallError (too_large, bad_request)."""
        if len(raw) <= INLINE:
            return _request(raw, dialect, call)
        return await asyncio.get_running_loop().run_in_executor(self._thread, _request, raw, dialect, call)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _request(raw: bytes, dialect: Dialect, call: Call) -> Request:
    sent = body.decode(raw)
    try:
        request = dialect.parse(sent, call)
        provenance.mark(request, call.headers, sent)
    except (RecursionError, OverflowError, UnicodeError, msgspec.MsgspecError) as e:
        raise bad("the request is nested too deeply, or has a number or a character that can't be kept") from e
    return request
