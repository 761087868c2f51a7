"""`per_request`: one trace per completion, each with its original prompt. Nothing is merged."""

from __future__ import annotations

from reconstruction.assemble import Plan
from reconstruction.builder import Builder, BuilderConfig
from reconstruction.labels import metadata
from reconstruction.tree import AttemptTree


def plan_calls(tree: AttemptTree, config: BuilderConfig) -> list[Plan]:
    return [Plan([call], metadata=metadata(call)) for call in tree.calls if not call.left_out]


build = Builder("per_request", BuilderConfig, plan_calls)
