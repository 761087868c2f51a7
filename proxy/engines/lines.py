"""Splitting a response body into the data of its server-sent events, however it was cut on the way."""

from __future__ import annotations

LIMIT = 64 << 20  # no sane event is longer; without a limit a broken server could fill the memory


class TooLong(ValueError):
    pass


class Events:
    """Every `data:` line is an event of its own: no engine splits its JSON over several. An unfinished line at the end of
    the body is dropped, as half an event."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._limit = limit

    def push(self, data: bytes) -> list[bytes]:
        """The events completed by `data`. Raises TooLong."""
        self._buffer += data
        last = self._buffer.rfind(b"\n", self._scanned)
        if last < 0:
            self._scanned = len(self._buffer)
            if self._scanned > self._limit:
                raise TooLong(f"an event of more than {self._limit} bytes")
            return []
        whole = bytes(self._buffer[:last])
        del self._buffer[: last + 1]
        self._scanned = len(self._buffer)
        return [line[5:].strip() for line in whole.split(b"\n") if line.startswith(b"data:")]
