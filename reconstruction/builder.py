"""What every builder shares: strict config, the counts, and the form of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct

from polar.codec import convert
from polar.completion import Completion
from polar.errors import InvalidTask
from polar.ids import attempt_id
from polar.trace import Fidelity, Trace, Trajectory
from reconstruction.assemble import Plan, assemble
from reconstruction.tree import CORRUPT, AttemptTree, grow

Weights = Literal["session_mean", "token_mean"]


class BuilderConfig(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`weights`: how a session's vote is shared by its traces, equally or by the number of trained tokens."""

    weights: Weights = "session_mean"


C = TypeVar("C", bound=BuilderConfig)


class Builder(Generic[C]):
    """A builder as the registry knows it: `build(completions, config) -> Trajectory`, and `check(config)` for submit.

    A user's builder may be any callable of that shape; one without `check` takes its config unchecked.
    """

    def __init__(self, name: str, config: type[C], plan: Callable[[AttemptTree, C], list[Plan]]):
        self.name = name
        self.config = config
        self.plan = plan

    def check(self, config: dict[str, Any]) -> C:
        """The config as a struct. Raises InvalidTask naming the key, what was found, and what is allowed."""
        allowed = self.config.__struct_fields__
        for key in config:
            if key not in allowed:
                raise InvalidTask(f"builder.config.{key}: unknown key for '{self.name}'; allowed: {', '.join(allowed)}")
        return convert(config, self.config, "builder.config")

    def __call__(self, completions: list[Completion], config: dict[str, Any]) -> Trajectory:
        settings = self.check(config)
        tree = grow(completions)
        fidelity = _count(tree)
        plans = self.plan(tree, settings)
        label = attempt_id(completions[0].session_id, completions[0].attempt) if completions else ""
        traces = [assemble(p, f"{label}.t{n}", fidelity) for n, p in enumerate(plans)]
        weigh(traces, settings.weights)
        return Trajectory(builder=self.name, traces=traces, fidelity=fidelity)


def _count(tree: AttemptTree) -> Fidelity:
    f = Fidelity(completions=len(tree.calls) + len(tree.corrupt), chains=len(tree.chains()), retries=tree.retries)
    for c in tree.corrupt:
        _leave_out(f, CORRUPT, len(c.sampled_ids))
    for call in tree.calls:
        f.sampled_tokens += len(call.sampled)
        if call.left_out:
            f.left_out[call.left_out] = f.left_out.get(call.left_out, 0) + len(call.sampled)
    return f


def _leave_out(f: Fidelity, reason: str, tokens: int) -> None:
    f.sampled_tokens += tokens
    f.left_out[reason] = f.left_out.get(reason, 0) + tokens


def weigh(traces: list[Trace], how: Weights) -> None:
    """Share one session's vote among its traces: equally, or by the number of trained tokens. Sums to 1."""
    total = sum(int(t.loss_mask.sum()) for t in traces)
    for t in traces:
        t.weight = int(t.loss_mask.sum()) / total if how == "token_mean" else 1 / len(traces)
