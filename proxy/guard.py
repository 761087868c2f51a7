"""Text that looks like a token of structure must not become one: a tool result that says `<|im_end|>` ends no turn.

Tokenizers recognise added tokens (turn markers, call markers, reasoning markers) anywhere in a text, whoever wrote it, and
both chat templates and renderers tokenise content and structure in one go. So every marker in content is cut behind its
first character before it is rendered, with a seam that nobody can guess, and the tokenizer is given the text on both sides
of a seam separately: the same characters, as ordinary tokens. Text without markers is tokenised as ever.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from proxy.neutral import Message

# Long and random: content can neither hold it by chance nor on purpose. Private-use characters pass every template filter.
SEAM = "".join(chr(0xE000 + secrets.randbelow(0x1800)) for _ in range(12))
_THINK = ("<think>", "</think>")


class Guard:
    """For one tokenizer. `join` is what a cut marker is put together with: nothing, or a space for tokenizers that can't
    encode a text in pieces."""

    def __init__(self, tokenizer: Any, stop_ids: frozenset[int]):
        added = {t.content: t for t in tokenizer.added_tokens_decoder.values() if t.content.strip()}
        stops = {tokenizer.convert_ids_to_tokens(i) for i in stop_ids}
        words = {w for w in {*added, *stops} if len(w) > 1}
        self._any = _pattern(words)
        # In an assistant's text the markers of reasoning and calls are the policy's own way to write them; only what ends
        # or begins a turn is never text.
        turns = {w for w in words if w in stops or added[w].special}
        self._turn = _pattern(turns.difference(_THINK))
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        # Markers that are looked for in the normalised text may be hidden in compatibility characters.
        self._normalise = normalizer.normalize_str if normalizer and any(t.normalized for t in added.values()) else None
        self.join = SEAM
        if words and not all(self._pieces_fit(tokenizer, w) for w in sorted(words)):
            self.join = " "

    def messages(self, messages: list[Message]) -> list[Message]:
        """The messages with their markers cut; those without any are the same objects."""
        return [self._message(m) for m in messages]

    def tools(self, tools: list[Any]) -> list[Any]:
        return self._deep(tools) if tools and self._any and self._any.search(_flat(tools)) else tools

    def text(self, text: str, pattern: re.Pattern[str] | None = None) -> str:
        pattern = pattern or self._any
        if pattern is None:
            return text
        if self._normalise is not None and not pattern.search(text):
            normal = self._normalise(text)
            text = normal if pattern.search(normal) else text
        while pattern.search(text):  # cutting one may reveal another that overlaps it
            text = pattern.sub(lambda m: m[0][0] + self.join + m[0][1:], text)
        return text

    def _message(self, m: Message) -> Message:
        assistant = m["role"] == "assistant"
        out = {}
        for k, v in m.items():
            if k == "content" and assistant:
                new = self.text(v, self._turn) if self._turn else v
            elif k == "tool_calls":
                new = [self._call(c) for c in v]
            elif isinstance(v, str) and k != "role":
                new = self.text(v)
            else:
                continue
            if new != v:
                out[k] = new
        return {**m, **out} if out else m

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = self.text(function["arguments"])
        if "\\" in arguments:
            # A marker may be spelt with escapes, which the template resolves.
            try:
                parsed = json.loads(arguments)
            except (ValueError, RecursionError):
                parsed = None
            if parsed is not None and self._any and self._any.search(_flat(parsed)):
                arguments = _flat(self._deep(parsed))
        function = {**function, "name": self.text(function["name"]), "arguments": arguments}
        return {**call, "id": self.text(call.get("id") or ""), "function": function}

    def _deep(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self._deep(v) for v in value]
        if isinstance(value, dict):
            return {self.text(k): self._deep(v) for k, v in value.items()}
        return value

    def _pieces_fit(self, tokenizer: Any, word: str) -> bool:
        """Whether a marker that was cut decodes to itself, and to none of the added tokens."""
        ids = encode(tokenizer, f"a {word[0]}{SEAM}{word[1:]} b")
        added = tokenizer.get_added_vocab().values()
        text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return not set(ids).intersection(added) and f" {word} " in text


def encode(tokenizer: Any, text: str) -> list[int]:
    """Ids of a rendered text, its seams taken out."""
    return [i for piece in text.split(SEAM) for i in tokenizer.encode(piece, add_special_tokens=False)]


class GuardedTokenizer:
    """A tokenizer that takes seams out: what renderers know of one, and everything else the original's."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "_tokenizer":  # asked for by copy, before there is one
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if SEAM not in text:
            return self._tokenizer.encode(text, **options)
        return [i for piece in text.split(SEAM) for i in self._tokenizer.encode(piece, **options)]

    def __call__(self, text: str, **options: Any) -> Any:
        if SEAM not in text:
            return self._tokenizer(text, **options)
        out: dict[str, list[Any]] = {"input_ids": [], "offset_mapping": []}
        at = 0
        for piece in text.split(SEAM):
            got = self._tokenizer(piece, **options)
            out["input_ids"] += got["input_ids"]
            out["offset_mapping"] += [(a + at, b + at) for a, b in got.get("offset_mapping", ())]
            at += len(piece) + len(SEAM)
        return out

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> Any:
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        return encode(self._tokenizer, text) if tokenize else text


def _pattern(words: set[str]) -> re.Pattern[str] | None:
    """Longest first. By first characters, nearly always one and the same: searching long texts is several times faster."""
    if not words:
        return None
    heads = sorted({w[0] for w in words})
    rests = {h: sorted((w[1:] for w in words if w[0] == h), key=lambda w: (-len(w), w)) for h in heads}
    return re.compile("|".join(f"{re.escape(h)}(?:{'|'.join(map(re.escape, r))})" for h, r in rests.items()))


def _flat(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
