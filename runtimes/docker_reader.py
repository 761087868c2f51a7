"""A file over what the engine streams."""

from __future__ import annotations

import io
from collections.abc import Iterator


class Reader(io.RawIOBase):
    """A file over an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        parts: list[bytes] = []
        left = size if size >= 0 else 1 << 62
        while left > 0:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            part, self._rest = self._rest[:left], self._rest[left:]
            parts.append(part)
            left -= len(part)
        return b"".join(parts)
