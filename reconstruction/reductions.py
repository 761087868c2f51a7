"""How the losses of single tokens become one number: the two readings of the paper's Eq. 12, by name.

With S sessions that have trained tokens, N_s trained tokens in session s over all its traces, and l the loss of a token:

    session_mean:  L = 1/S * sum over s of (1/N_s * sum over tokens of s of l)      one session, one vote
    token_mean:    L = (sum over all tokens of all sessions of l) / (sum over s of N_s)      one token, one vote

Neither depends on how many traces a session fell into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from polar.trace import Trajectory
from reconstruction.rewards import trained_tokens, units

Reduction = Literal["session_mean", "token_mean"]


def coefficients(sessions: Sequence[Trajectory | None], reduction: Reduction = "session_mean") -> list[list[float]]:
    """Per session, one factor per trace (or packed call): the loss is the sum over traces of factor * the sum of the trace's
    token losses where loss_mask is 1. A session given as none (excluded) gets no factors and has no say.

    Factor times trained tokens, summed over everything, is 1 (0 when there is nothing to train on).
    """
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction '{reduction}' is unknown; allowed: {', '.join(get_args(Reduction))}")
    tokens = [[] if t is None else [trained_tokens(u) for u in units(t)] for t in sessions]
    voters = sum(sum(own) > 0 for own in tokens)
    everything = sum(map(sum, tokens))
    out = []
    for own in tokens:
        share = voters * sum(own) if reduction == "session_mean" else everything
        out.append([1 / share if share else 0.0 for _ in own])
    return out
