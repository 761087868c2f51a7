"""The text of a growing list of tokens, one token at a time, with stop strings."""

from __future__ import annotations

from engine.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"


class GrowingText:
    """Decodes tokens as they come; the cost per token doesn't grow with the text.

    A token can end in the middle of a UTF-8 character. Such text is held back until it is complete (or
    `close` is called), so what `visible` returns is always the beginning of the final text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: list[str], skip_special_tokens: bool, trim: bool):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._stops = stops
        self._trim = trim
        self._window: list[int] = []  # the last tokens: some already in the text for context, then the pending ones
        self._known = ""  # text of the window's tokens that are already in _text
        self._pending_from = 0
        self._text = ""
        self._matched: str | None = None

    def push(self, token: int) -> str | None:
        """Add a token. Returns the stop string that its text completes, or None."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, self._skip)
        if not text.endswith(_INCOMPLETE):
            self._accept(text)
        return self._matched

    def close(self) -> None:
        """No more tokens: incomplete characters are shown as U+FFFD."""
        self._stops = self._stops if self._matched else []  # too late to stop
        if self._pending_from < len(self._window):
            self._accept(self._tokenizer.decode(self._window, self._skip))

    def visible(self, final: bool) -> str:
        """The text so far. Unless it is `final`, an ending that may become a stop string is left out."""
        if self._matched is not None:
            start = self._text.index(self._matched)
            return self._text[: start if self._trim else start + len(self._matched)]
        if final or not self._stops or not self._trim:
            return self._text
        return self._text[: len(self._text) - self._beginning_of_stop()]

    def _accept(self, text: str) -> None:
        new = text[len(self._known) :]
        self._text += new
        if new and self._matched is None and self._stops:
            self._matched = self._find_stop(len(new))
        # Keep the tokens just accepted as context: some decoders treat the first token of a text specially.
        self._window = self._window[self._pending_from :]
        self._pending_from = len(self._window)
        self._known = self._tokenizer.decode(self._window, self._skip)

    def _find_stop(self, new: int) -> str | None:
        found: list[tuple[int, str]] = []
        for stop in self._stops:
            at = self._text.find(stop, max(0, len(self._text) - new - len(stop) + 1))
            if at >= 0:
                found.append((at, stop))
        return min(found)[1] if found else None

    def _beginning_of_stop(self) -> int:
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._text)), longest, -1):
                if self._text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
