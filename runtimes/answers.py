"""Whether an HTTP/1 answer is whole when its connection ends.

An end can't be told from a break by the connection: a killed proxy's is closed by the kernel as politely as an idle one,
and a Unix socket knows no reset at all. So the relays follow the framing of what they carry, without reading it.

This text also runs inside containers, under the Python of their image (3.6 or later): it imports nothing.
"""

_LIMIT = 1 << 16  # bytes of a head, or of a chunk's size line

# What comes after the bytes that are known to come: a head, a chunk's size, lines after the last chunk; or only the
# connection's end, with which the answer ends, too (_REST), or which no sense can be made of (_LOST).
_HEAD, _SIZE, _TRAILER, _REST, _LOST = range(5)
_ENDS = {_HEAD: b"\r\n\r\n", _SIZE: b"\r\n", _TRAILER: b"\r\n"}


class Answers:
    """The answers of one connection, one after another."""

    def __init__(self) -> None:
        self._next = _HEAD
        self._left = 0  # bytes of a body or chunk to come before
        self._part = b""  # of a head or line that hasn't ended yet
        self._bare = False

    def whole(self) -> bool:
        """No answer has begun that hasn't ended. What makes no sense is never whole."""
        return not (self._left or self._part) and self._next in (_HEAD, _REST)

    def asked(self, data: bytes) -> None:
        """`data` goes to the proxy. The answer to HEAD has the length of a body that it lacks."""
        if self.whole() and data.startswith(b"HEAD "):
            self._bare = True

    def feed(self, data: bytes) -> None:
        """`data` came from the proxy. Never raises."""
        at = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
            elif self._next in _ENDS:
                if self._part:
                    data, at, self._part = self._part + data[at:], 0, b""
                mark = _ENDS[self._next]
                end = data.find(mark, at)
                if end < 0:
                    self._keep(data[at:])
                    return
                self._read(data[at:end])
                at = end + len(mark)
            else:
                return

    def _keep(self, part: bytes) -> None:
        if len(part) > _LIMIT:
            self._next = _LOST
        else:
            self._part = part

    def _read(self, text: bytes) -> None:
        if self._next == _HEAD:
            self._next, self._left = self._body(text.lower().split(b"\r\n"))
        elif self._next == _SIZE:
            size = _number(text.split(b";")[0], 16)
            self._next = _LOST if size < 0 else _SIZE if size else _TRAILER
            self._left = size + 2 if size > 0 else 0
        elif not text:
            self._next = _HEAD

    def _body(self, lines: list) -> tuple:
        """What comes after this head, and behind how many bytes."""
        words = lines[0].split()
        if len(words) < 2 or not words[0].startswith(b"http/1."):
            return _LOST, 0
        if words[1] == b"101":
            return _REST, 0
        if words[1].startswith(b"1"):
            return _HEAD, 0
        bare, self._bare = self._bare or words[1] in (b"204", b"304"), False
        if bare:
            return _HEAD, 0
        fields = dict(line.replace(b" ", b"").split(b":", 1) for line in lines[1:] if b":" in line)
        if fields.get(b"transfer-encoding", b"").endswith(b"chunked"):
            return _SIZE, 0
        if b"content-length" not in fields:
            return _REST, 0
        size = _number(fields[b"content-length"], 10)
        return (_LOST, 0) if size < 0 else (_HEAD, size)


def _number(text: bytes, base: int) -> int:
    """-1: it is none."""
    try:
        return max(-1, int(text, base))
    except ValueError:
        return -1
