"""`prefix_merging`: the paper's rule, made safe.

A completion whose prompt strictly extends the previous one joins its trace: raw sampled ids kept, what stands between
two responses inserted with mask 0. Where the rendered prompt doesn't contain the raw sample, the segment is flagged
inexact and the drift counted; where no safe boundary is found, a new trace begins and nothing is dropped.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from msgspec import Meta

from reconstruction.assemble import Plan
from reconstruction.boundary import join, learn_end_of_turn
from reconstruction.builder import Builder, BuilderConfig
from reconstruction.chaining import plan_chains
from reconstruction.tree import AttemptTree

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]


class Config(BuilderConfig, kw_only=True, frozen=True):
    """`end_of_turn`: token ids that end a turn; learned from the attempt's own finished turns when not given."""

    end_of_turn: list[TokenId] | None = None


def _plan(tree: AttemptTree, config: Config) -> list[Plan]:
    if config.end_of_turn is None:
        end_of_turn = learn_end_of_turn(call.completion for call in tree.calls)
    else:
        end_of_turn = np.array(sorted(set(config.end_of_turn)), dtype=np.int32)
    return plan_chains(tree, lambda a, b: join(a, b, end_of_turn), lambda found: True)


build = Builder("prefix_merging", Config, _plan)
