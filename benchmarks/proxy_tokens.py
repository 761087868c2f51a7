"""What continuing a session by its raw tokens saves: the tokenisation of a long session, turn by turn, rendered in full
each time and bridged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.proxy_talk import SAID, TOOLS, text
from polar import arrays
from polar.config import Model
from proxy.codec import Codec

TOKENS = 70_000  # of the whole session


async def tokenisation(tokenizer: Path, ids: list[int], turns: int) -> dict[str, float]:
    """Seconds for a session of `turns` turns and about 70,000 tokens."""
    codec = Codec("bench", Model(engine="", tokenizer=str(tokenizer), tool_parser="qwen3"))
    said: dict[str, Any] = {"role": "assistant", "content": SAID.strip()}
    sample = text(2000)
    per_character = len(await codec.render([{"role": "user", "content": sample}], [])) / len(sample)
    size = int((TOKENS / turns - len(ids) - 10) / per_character)
    system = {"role": "system", "content": "You are an agent. " * 50}
    asked = [{"role": "user", "content": f"{i}. {text(size)}"} for i in range(turns)]
    await codec.render([system, asked[0]], TOOLS)
    full = bridged = 0.0
    messages: list[dict[str, Any]] = [system]
    sampled = arrays.ids(ids)
    prompt = arrays.ids([])
    for i in range(turns):
        messages.append(asked[i])
        begun = time.perf_counter()
        rendered = await codec.render(messages, TOOLS)
        took = time.perf_counter() - begun
        full += took
        if i == 0:
            prompt, bridged = rendered, took
        else:
            begun = time.perf_counter()
            extended = await codec.extend(prompt, sampled, said, [asked[i]], TOOLS)
            bridged += time.perf_counter() - begun
            if extended is None:
                raise RuntimeError("the renderer has no bridge for this session")
            prompt = extended
        messages.append(said)
    codec.close()
    return {
        "tokenise_tokens": len(prompt),
        "tokenise_full_s": round(full, 3),
        "tokenise_bridged_s": round(bridged, 4),
        "tokenise_ratio": round(full / bridged, 1),
    }
