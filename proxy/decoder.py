"""Text of a growing token sequence, piece by piece, never cutting a character."""

from __future__ import annotations

from collections.abc import Callable


class TextDecoder:
    """Decodes a window of recent tokens: from the last piece (some decoders treat a first token differently) to the end.

    A piece that ends in U+FFFD may be half a character and waits for more tokens.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is out

    @property
    def undecoded(self) -> int:
        """Tokens whose text is not out yet."""
        return len(self._window) - self._known

    def push(self, ids: list[int]) -> str:
        self._window += ids
        before = self._decode(self._window[: self._known]) if self._known else ""
        text = self._decode(self._window)
        if text.endswith("\ufffd") or len(text) < len(before):
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return text[len(before) :]

    def restart(self, token: int) -> None:
        """Go on behind `token`, whose text is somebody else's business."""
        self._window, self._known = [token], 1
