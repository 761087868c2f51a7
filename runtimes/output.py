"""What a command writes: the last bytes in memory, the first ones in a log file, both bounded."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO


class Output:
    """Feed chunks, close, then read `tail` (at most `limit` bytes) and `total` (bytes fed).

    A log file that can't be written (disk full) is given up silently: the command's result matters more.
    """

    def __init__(self, limit: int, log: Path | None, log_limit: int):
        self.total = 0
        self._limit = max(0, limit)
        self._tail = bytearray()
        self._log_left = log_limit
        self._file: BinaryIO | None = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(log, "wb", buffering=0)  # noqa: SIM115  (closed by close())

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        self._tail += data[-self._limit :] if self._limit else b""
        if len(self._tail) > 2 * self._limit:
            del self._tail[: -self._limit]
        if self._file and self._log_left > 0:
            part = data[: self._log_left]
            try:
                self._file.write(part)
                self._log_left -= len(part)
            except OSError:
                self._log_left = 0

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-self._limit :]) if self._limit else b""

    def close(self) -> None:
        if self._file:
            self._file.close()
            self._file = None
