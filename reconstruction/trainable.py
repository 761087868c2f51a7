"""Can the sampled tokens of a completion be trained on? If not, why."""

from __future__ import annotations

import numpy as np

from polar.completion import Completion


def reason_against(c: Completion) -> str:
    """Empty when trainable. A reason is counted in the fidelity report; nothing is repaired or guessed."""
    if c.untrainable:
        return c.untrainable
    if not len(c.sampled_ids):
        return "empty_sample"
    if len(c.logprobs) != len(c.sampled_ids):
        return "logprobs_misaligned"
    if not np.isfinite(c.logprobs).all():
        return "logprobs_not_finite"
    return ""
