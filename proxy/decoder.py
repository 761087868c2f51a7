"""Text of a growing token sequence, piece by piece, never cutting a character."""

from __future__ import annotations

from collections.abc import Callable

_STUCK = 32  # tokens without a whole character at their end


class TextDecoder:
    """Decodes a window of recent tokens: from the last piece (some decoders treat a first token differently) to the end.

    A piece that ends in U+FFFD may be half a character and waits for more tokens. What goes on so is let out but for its
    end: else each token would decode all of it again.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is out
        self._stuck = _STUCK

    @property
    def undecoded(self) -> int:
        """Tokens whose text is not out yet."""
        return len(self._window) - self._known

    def push(self, ids: list[int]) -> str:
        self._window += ids
        before = self._decode(self._window[: self._known]) if self._known else ""
        text = self._decode(self._window)
        if text.endswith("\ufffd") or len(text) < len(before):
            return self._part(before, text) if self.undecoded >= self._stuck else ""
        self._window = self._window[self._known :]
        self._known, self._stuck = len(self._window), _STUCK
        return text[len(before) :]

    def _part(self, before: str, text: str) -> str:
        """The beginning that no later token can change: up to a place where both sides decode by themselves. Half a
        character has three bytes at most, so the last three tokens hold it. Where a run of bytes is decoded as a whole,
        all of it looks like garbage until it is complete: then it was text a few tokens earlier."""
        w = self._window
        for at in range(len(w) - 3, max(self._known + 3, len(w) - 8), -1):
            head = self._decode(w[:at])
            shorter = (self._decode(w[: at - n]) for n in (1, 2, 3))
            if head + self._decode(w[at:]) == text and all(map(head.startswith, (before, *shorter))):
                self._window, self._known, self._stuck = w[at:], 0, _STUCK
                return head[len(before) :]
        self._stuck = self.undecoded + _STUCK
        return ""

    def restart(self, token: int) -> None:
        """Go on behind `token`, whose text is somebody else's business."""
        self._window, self._known, self._stuck = [token], 1, _STUCK
