"""A tokenizer as the hot path needs it: the same ids and texts as the original's, without what the library does around them
for callers that pad, truncate and want tensors. What isn't here is the original's."""

from __future__ import annotations

from typing import Any

_SHORT = 64  # renderers ask for the ids of the same few markers and headers again and again
_CACHED = 4096


_PROBES = ("<|im_start|>assistant\n", " a  b", "Größe 箱 🎁\u200d\r\n\tx", "<s></s>[INST]", "don't , stop . now")


def quick(tokenizer: Any) -> Any:
    """The quick form of a tokenizer, or itself where that would not be the same."""
    try:
        fast = QuickTokenizer(tokenizer)
        for text in _PROBES:
            long = text * (_SHORT // len(text) + 1)
            for t in (text, long):
                ids = tokenizer.encode(t, add_special_tokens=False)
                options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
                if fast.encode(t, add_special_tokens=False) != ids or fast.decode(ids, **options) != tokenizer.decode(
                    ids, **options
                ):
                    return tokenizer
    except Exception:  # no backend of the usual form
        return tokenizer
    return fast


class QuickTokenizer:
    """`tokenizer` is one of transformers' fast tokenizers; not to be shared between threads."""

    def __init__(self, tokenizer: Any):
        self._original = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Lengths are the model table's business; the library would warn of each prompt that is longer than it expects.
        tokenizer.model_max_length = int(1e30)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
        self._known: dict[str, list[int]] = {}

    def __getattr__(self, name: str) -> Any:
        if name == "_original":  # asked for by copy, before there is one
            raise AttributeError(name)
        return getattr(self._original, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        if options != {"add_special_tokens": False}:
            return self._original.encode(text, **options)
        if len(text) > _SHORT:
            return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids = self._known.get(text)
        if ids is None:
            ids = self._backend.encode(text, add_special_tokens=False).ids
            if len(self._known) >= _CACHED:
                self._known.clear()
            self._known[text] = ids
        return list(ids)

    def decode(self, ids: Any, **options: Any) -> str:
        cleans = options.get("clean_up_tokenization_spaces")
        cleans = self._cleans if cleans is None else cleans
        known = options.keys() <= {"skip_special_tokens", "clean_up_tokenization_spaces"}
        if cleans or not known or options.get("skip_special_tokens", False) or not isinstance(ids, list):
            return self._original.decode(ids, **options)
        return self._backend.decode(ids, skip_special_tokens=False)
