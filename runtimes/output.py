"""What a command writes: the last bytes in memory, the first and the last ones in a log file, both bounded."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

_SMALL = 100  # bytes; a log of fewer has no room for a line about itself


class Output:
    """Feed chunks, close, then read `tail` (at most `limit` bytes) and `total` (bytes fed).

    The log grows as chunks come, to `log_limit` bytes. If there were more, close() puts the tail, where an error stands, in
    the place of its last bytes, behind a line that says how many are missing. A log file that can't be written (disk full)
    is given up silently: the command's result matters more.
    """

    def __init__(self, limit: int, log: Path | None, log_limit: int):
        self.total = 0
        self._limit = max(0, limit)
        self._tail = bytearray()
        self._log_limit = self._log_left = log_limit
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

    def forget(self) -> None:
        """All of it so far: it was the engine's, of a command that never began."""
        self.total, self._log_left = 0, self._log_limit
        self._tail.clear()
        if self._file:
            try:
                self._file.seek(0)
                self._file.truncate()
            except OSError:
                self._log_left = 0

    @property
    def tail(self) -> bytes:
        return bytes(self._tail[-self._limit :]) if self._limit else b""

    def close(self) -> None:
        if self._file:
            try:
                if self.total > self._log_limit >= _SMALL:
                    self._end(self._file)
            except OSError:
                pass
            finally:
                self._file.close()
                self._file = None

    def _end(self, file: BinaryIO) -> None:
        """At most half of the log is its end."""
        end = self.tail[-(self._log_limit // 2) :]
        room = len(_left_out(self.total, 0))
        head = self._log_limit - len(end) - room
        if end and file.tell() == self._log_limit:  # all of it was written
            file.seek(head)
            file.write(_left_out(self.total - head - len(end), room) + end)


def _left_out(count: int, length: int) -> bytes:
    return f"\n[{count} bytes left out]".encode().ljust(length - 1) + b"\n"
