"""`exact`: a completion joins a trace only if the trace so far equals its original prompt, token for token.

Every trained token stands in the context that the model was given. Where a prompt renders an earlier response in other
tokens than were sampled, or leaves it out, a new trace begins with that prompt as it was.
"""

from __future__ import annotations

from reconstruction.assemble import Plan
from reconstruction.boundary import join, learn_end_of_turn
from reconstruction.builder import Builder, BuilderConfig
from reconstruction.chaining import plan_chains
from reconstruction.tree import AttemptTree


def _plan(tree: AttemptTree, config: BuilderConfig) -> list[Plan]:
    # A literal join needs no end marker; with them the length of the drift at a split can be told.
    end_of_turn = learn_end_of_turn(call.completion for call in tree.calls)
    return plan_chains(tree, lambda a, b: join(a, b, end_of_turn), lambda found: found.literal)


build = Builder("exact", BuilderConfig, _plan)
