"""How many token ids a model knows: an engine may die of one that it doesn't."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def size(tokenizer: Any, source: str) -> int:
    """The tokenizer's, or the model's where its config.json lies beside: models pad their vocabulary, and now and then
    sample an id of the padding."""
    own = max(tokenizer.get_vocab().values(), default=-1) + 1
    try:
        config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        return max(own, int(text.get("vocab_size") or config.get("vocab_size") or 0))
    except (OSError, ValueError, AttributeError, TypeError):
        return own
