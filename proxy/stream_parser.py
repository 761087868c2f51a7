"""Sampled tokens to neutral events while they arrive, such that the final parse never contradicts what was sent.

Ordinary text is decoded as it comes. Any token or text that could be structure asks the authoritative parse of the whole
sample so far, and what that doesn't make certain is held back: white space at an edge, half a character, the beginning of
a marker or stop sequence, a tool call that isn't closed.
"""

from __future__ import annotations

from collections.abc import Iterator

from proxy.codec import Codec, Parsed
from proxy.decoder import TextDecoder
from proxy.neutral import Event, Message, Reasoning, Text, ToolCall, fold

# A sample full of markers would be parsed again and again; after so many times it is answered when complete.
_MAX_PARSES = 64


class Contradiction(Exception):
    """The final parse is not an extension of what was sent. `message` is the authoritative one."""

    def __init__(self, message: Message):
        super().__init__("streamed text is not a prefix of the parsed answer")
        self.message = message


class StreamParser:
    """One sample. Its n-th tool call gets the id `<call_prefix>_<n>` unless the model's format has ids of its own."""

    def __init__(
        self, codec: Codec, prompt_tail: list[int], tools: list, calls_allowed: bool, stops: list[str], call_prefix: str
    ):
        self._codec, self._prompt_tail, self._tools = codec, prompt_tail, tools
        self._calls_allowed, self._prefix, self._stops = calls_allowed, call_prefix, stops
        self._ids: list[int] = []
        self._decoder = TextDecoder(codec.decode)
        self._sent: list[Event] = []
        self._sent_text = {Reasoning: "", Text: ""}
        self._sent_calls = 0
        self._channel: type[Reasoning] | type[Text] = Text
        self._pending = ""  # text of the channel that is known and not sent
        self._growing = True  # ordinary tokens extend the channel's text
        self._live = codec.streamable
        self._parses = 0
        self._parsed: tuple[int, Parsed] | None = None  # the last parse, by how many tokens it was of
        self._heads = codec.marker_heads | {s[:n] for s in stops for n in range(1, len(s) + 1)}
        self._longest = max(codec.longest_head, *map(len, stops), 0)

    def feed(self, ids: list[int]) -> list[Event]:
        """Events that the new tokens make certain."""
        start, before = len(self._ids), len(self._sent)
        self._ids += ids
        for lo, hi in self._runs(start):
            if not self._live:
                break
            if self._ids[lo] in self._codec.structural_ids:
                self._decoder.restart(self._ids[lo])
                self._look(hi, "")
            elif self._growing:
                new = self._decoder.push(self._ids[lo:hi])
                blank = not self._sent_text[self._channel] and not self._pending.strip()
                self._pending += new
                if (blank and new.strip()) or (new and self._codec.marker.search(self._pending)):
                    self._look(hi - self._decoder.undecoded, self._pending)
        if self._live and self._growing:
            self._send(self._channel, self._certain())
        return self._sent[before:]

    def hold(self) -> None:
        """Send nothing more before finish()."""
        self._live = False

    def finish(self, matched: int | str | None) -> tuple[Message, list[Event]]:
        """The authoritative message, and the events still to be sent. `matched` is the stop sequence or token that ended
        the sample. Raises Contradiction."""
        before = len(self._sent)
        # An engine may know end tokens that the template doesn't.
        ended = bool(self._ids) and matched == self._ids[-1]
        parsed = self._parse(len(self._ids) - ended)
        reasoning = parsed.reasoning.strip()
        content, calls = self._resolve(parsed, len(parsed.attempts))
        if isinstance(matched, str):
            reasoning, content = _cut(reasoning, content, matched)
        whole: list[Event] = [Reasoning(reasoning), Text(content), *calls]
        message, _ = fold([e for e in whole if not isinstance(e, (Reasoning, Text)) or e.text])
        if not self._advance(Reasoning, reasoning) or not self._advance(Text, content):
            raise Contradiction(message)
        self._send_calls(calls)
        sent, _ = fold(self._sent)
        if sent != message:
            raise Contradiction(message)
        return message, self._sent[before:]

    def _runs(self, start: int) -> Iterator[tuple[int, int]]:
        """[lo, hi) of runs of ordinary tokens and of single structural ones; what a stop token means is left to finish()."""
        lo = start
        for at in range(start, len(self._ids)):
            if self._ids[at] in self._codec.structural_ids:
                if lo < at:
                    yield lo, at
                if self._ids[at] in self._codec.stop_ids:
                    self._live = False
                    return
                yield at, at + 1
                lo = at + 1
        if lo < len(self._ids):
            yield lo, len(self._ids)

    def _look(self, end: int, raw: str) -> None:
        """Parse the first `end` tokens and take over what is certain. `raw` is the channel's undecided text that they end
        with, whose trailing white space a parser may have stripped too early."""
        self._parses += 1
        if self._parses > _MAX_PARSES:
            self._live = False
            return
        parsed = self._parse(end)
        if parsed.reasoning_open:
            self._channel = Reasoning
            self._continue(parsed.reasoning.lstrip())
            return
        if not parsed.reasoning_closed:
            # Reasoning that a tool call seems to have ended may still be closed in the ordinary way, which makes the call
            # part of it.
            self._growing = False
            return
        self._live = self._advance(Reasoning, parsed.reasoning.strip())
        self._channel = Text
        final = len(parsed.attempts) - parsed.open_block
        content, calls = self._resolve(parsed, final)
        if parsed.attempts:
            self._growing = False
            self._live = self._live and self._advance(Text, content)
            self._send_calls(calls)
        else:
            edge = raw[len(raw.rstrip()) :]
            self._continue(content.rstrip() + edge if edge else content)

    def _parse(self, end: int) -> Parsed:
        """Of the first `end` tokens. The last look is often at all of them: a call's closing token ends most samples."""
        if self._parsed is None or self._parsed[0] != end:
            self._parsed = end, self._codec.parse(self._ids[:end], self._prompt_tail, self._tools)
        return self._parsed[1]

    def _continue(self, visible: str) -> None:
        """The channel's text so far is `visible`, and it goes on."""
        sent = self._sent_text[self._channel]
        self._live = self._live and visible.startswith(sent)
        self._pending = visible[len(sent) :]
        self._growing = True

    def _certain(self) -> str:
        """The part of the pending text that no later token can take back."""
        text = self._pending
        for stop in self._stops:
            if (at := text.find(stop)) >= 0:
                text = text[:at]
        while True:
            kept = text
            for n in range(min(self._longest, len(text)), 0, -1):
                if text[-n:] in self._heads:
                    text = text[:-n]
                    break
            text = text.rstrip()
            if text == kept:
                return text

    def _resolve(self, parsed: Parsed, final: int) -> tuple[str, list[ToolCall]]:
        """Content and calls from the first `final` attempts: what is no call is text."""
        content = parsed.content
        calls: list[ToolCall] = []
        for attempt in parsed.attempts[:final]:
            if attempt.call is None or not self._calls_allowed:
                content += attempt.text
            else:
                own = attempt.call.id or f"{self._prefix}_{len(calls)}"
                calls.append(ToolCall(own, attempt.call.name, attempt.call.arguments))
        return content, calls

    def _advance(self, channel: type[Reasoning] | type[Text], whole: str) -> bool:
        """Send what is missing of the channel's text; False if what was sent is not its beginning."""
        sent = self._sent_text[channel]
        if not whole.startswith(sent):
            return False
        if channel is self._channel:
            self._pending = whole[len(sent) :]
        self._send(channel, whole[len(sent) :])
        return True

    def _send(self, channel: type[Reasoning] | type[Text], text: str) -> None:
        if text:
            self._sent.append(channel(text))
            self._sent_text[channel] += text
            if channel is self._channel:
                self._pending = self._pending[len(text) :]

    def _send_calls(self, calls: list[ToolCall]) -> None:
        self._sent += calls[self._sent_calls :]
        self._sent_calls = max(self._sent_calls, len(calls))


def _cut(reasoning: str, content: str, matched: str) -> tuple[str, str]:
    """The texts without the stop sequence that ended them, and what came behind it."""
    if (at := content.find(matched)) >= 0:
        return reasoning, content[:at]
    if not content and (at := reasoning.find(matched)) >= 0:
        return reasoning[:at].rstrip(), content
    return reasoning, content
