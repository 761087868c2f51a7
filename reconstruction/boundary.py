"""Where one turn ends and the next begins: what stands between two sampled responses of a chain.

The paper's rule (Polar, Eq. 5-9): the next prompt strictly extends the previous one; the extension starts with the
previous response as the chat template renders it, up to the first end-of-turn; what follows is the interstitial.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from polar.completion import Completion
from reconstruction.tokens import common_prefix, is_prefix, pieces, tokens_from
from reconstruction.tree import Call


@dataclass(frozen=True)
class Join:
    """`interstitial`: token arrays to insert, in order. `literal`: the next prompt contains the previous prompt and raw
    sample as they are; else `drift` counts the tokens in which the rendered response differs from the raw one."""

    interstitial: list[np.ndarray]
    literal: bool
    drift: int = 0


def learn_end_of_turn(completions: Iterable[Completion]) -> np.ndarray:
    """End-of-turn ids (int32, sorted) as the attempt itself shows them: what its finished turns ended with."""
    found = set()
    for c in completions:
        if c.finish_reason not in ("stop", "tool_calls"):
            continue
        if isinstance(c.stop_matched, int):
            found.add(c.stop_matched)
        elif c.stop_matched is None and len(c.sampled_ids):
            found.add(int(c.sampled_ids[-1]))
        # A stop string ends the sample in the middle of a turn: its last token is no end marker.
    return np.array(sorted(found), dtype=np.int32)


def join(previous: Call, following: Call, end_of_turn: np.ndarray) -> Join | str:
    """How `following` continues `previous` in one trace, or the reason why it can't safely."""
    if not is_prefix(previous.prompt, following.prompt) or previous.prompt is following.prompt:
        return "not_an_extension"
    if is_prefix(previous.full, following.prompt):
        return Join(pieces(following.prompt, previous.full.depth), literal=True)
    raw = previous.sampled
    if len(raw) > 1 and np.isin(raw[:-1], end_of_turn).any():
        return "ambiguous_end_of_turn"  # the first marker of the rendered response need not be its last
    tail = tokens_from(following.prompt, previous.prompt.depth)
    hits = np.isin(tail, end_of_turn)
    at = int(hits.argmax()) if len(hits) else 0
    if not len(hits) or not hits[at]:
        return "no_end_of_turn"
    # A raw sample that was cut short gets its end marker from the rendered prompt, masked.
    start = at + 1 if raw[-1] in end_of_turn else at
    return Join([tail[start:]], literal=False, drift=_differing(raw, tail[:start]))


def _differing(raw: np.ndarray, rendered: np.ndarray) -> int:
    """Tokens (of the longer side) that are left after the common beginning and the common end."""
    head = common_prefix(raw, rendered)
    raw, rendered = raw[head:], rendered[head:]
    return max(len(raw), len(rendered)) - common_prefix(raw[::-1], rendered[::-1])
