"""What every builder shares: strict config, the counts, and the form of the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from msgspec import Struct, to_builtins

from polar.codec import convert
from polar.completion import Completion
from polar.errors import InvalidTask
from polar.ids import attempt_id
from polar.packed import PackedTree
from polar.trace import Fidelity, Trajectory
from reconstruction.assemble import Plan, assemble
from reconstruction.rewards import trained_tokens, units
from reconstruction.tree import CORRUPT, AttemptTree, grow

Weights = Literal["tokens", "equal"]


class BuilderConfig(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`weights`: how a session's vote is shared by its traces: by the number of trained tokens (so it doesn't matter into
    how many traces it fell), or equally."""

    weights: Weights = "tokens"


C = TypeVar("C", bound=BuilderConfig)


class Builder(Generic[C]):
    """A builder as the registry knows it: `build(completions, config) -> Trajectory`, and `check(config)` for submit.

    `pack` makes one packed tree of the plans instead of a trace of each.
    A user's builder may be any callable of that shape; one without `check` takes its config unchecked.
    """

    def __init__(
        self,
        name: str,
        config: type[C],
        plan: Callable[[AttemptTree, C], list[Plan]],
        pack: Callable[[list[Plan], str, Fidelity], PackedTree] | None = None,
    ):
        self.name = name
        self.config = config
        self.plan = plan
        self.pack = pack

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
        out = Trajectory(builder=self.name, config=to_builtins(settings), fidelity=fidelity)
        if self.pack:
            out.packed = self.pack(plans, label, fidelity)
        else:
            out.traces = [assemble(p, f"{label}.t{n}", fidelity) for n, p in enumerate(plans)]
        fidelity.merge_factor = sum(len(p.calls) for p in plans) / max(1, fidelity.traces)
        weigh(out, settings.weights)
        return out


def _count(tree: AttemptTree) -> Fidelity:
    f = Fidelity(completions=len(tree.calls) + len(tree.corrupt), chains=len(tree.chains()), retries=tree.retries)
    for reason, n in [(CORRUPT, len(c.sampled_ids)) for c in tree.corrupt] + [
        (call.left_out, len(call.sampled)) for call in tree.calls
    ]:
        f.sampled_tokens += n
        if reason:
            f.left_out[reason] = f.left_out.get(reason, 0) + n
            f.untrainable[reason] = f.untrainable.get(reason, 0) + 1
    return f


def weigh(trajectory: Trajectory, how: Weights) -> None:
    """Share one session's vote among its traces (or packed calls). Sums to 1."""
    voters = [(u, trained_tokens(u)) for u in units(trajectory)]
    total = sum(n for _, n in voters)
    for unit, n in voters:
        unit.weight = n / total if how == "tokens" else 1 / len(voters)
