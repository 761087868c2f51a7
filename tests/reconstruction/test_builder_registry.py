from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from attempt_maker import EOT, completion

from polar.errors import InvalidTask, PolarError
from polar.task import BuilderSpec
from polar.trace import Fidelity, Trajectory
from reconstruction import per_request, prefix_merging, registry

MERGING = "reconstruction.prefix_merging:build"


def test_the_declared_entry_points_are_these_builders():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["polar.builders"]
    loaded = {n: getattr(import_module(p.partition(":")[0]), p.partition(":")[2]) for n, p in points.items()}
    assert loaded["per_request"] is per_request.build and loaded["prefix_merging"] is prefix_merging.build
    assert all(builder.name == name for name, builder in loaded.items())


def test_build_by_spec():
    a = completion(0, [1], [2, EOT])
    out = registry.build(BuilderSpec(strategy=MERGING, config={"end_of_turn": [EOT]}), [a])
    assert out.builder == "prefix_merging" and len(out.traces) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"end_of_tun": [1]}, "builder.config.end_of_tun: unknown key .* allowed: weights, end_of_turn"),
        ({"end_of_turn": "x"}, "end_of_turn"),
        ({"end_of_turn": [-1]}, "end_of_turn"),
        ({"weights": "fair"}, "weights.*fair"),
    ],
)
def test_config_is_strict_at_submit(config, message):
    with pytest.raises(InvalidTask, match=message):
        registry.check_config(BuilderSpec(strategy=MERGING, config=config))


def test_unknown_builders_are_refused():
    with pytest.raises(InvalidTask, match=r"builder\.strategy.*'nope'"):
        registry.check_config(BuilderSpec(strategy="nope"))
    with pytest.raises(InvalidTask, match="not a callable"):
        registry.check_config(BuilderSpec(strategy="reconstruction.registry:FAILED"))


def loses_a_token(completions, config):
    """A user's builder: any callable of this shape, by its import path."""
    return Trajectory(builder="mine", fidelity=Fidelity(completions=1, sampled_tokens=2, left_out={"because": 1}))


def lies_about_it(completions, config):
    return Trajectory(builder="mine", fidelity=Fidelity(completions=1, sampled_tokens=0))


def rewrites_a_token(completions, config):
    out = prefix_merging.build(completions, {})
    out.traces[0].response_ids[0] += 1
    return out


def misaligns(completions, config):
    out = prefix_merging.build(completions, {})
    out.traces[0].logprobs = out.traces[0].logprobs[:-1]
    return out


def breaks(completions, config):
    raise KeyError("x")


@pytest.mark.parametrize("name", ["loses_a_token", "lies_about_it", "rewrites_a_token", "misaligns", "breaks"])
def test_no_trajectory_leaves_that_breaks_a_law(name):
    spec = BuilderSpec(strategy=f"{__name__}:{name}", config={"anything": 1})
    registry.check_config(spec)
    with pytest.raises(PolarError) as e:
        registry.build(spec, [completion(0, [1], [2, EOT])])
    assert e.value.code == "reconstruction_failed" and not e.value.retryable


def says_one_thing_twice(completions, config):
    out = prefix_merging.build(completions, {})
    out.traces[1] = out.traces[0]
    return out


def test_a_completion_that_stands_in_for_another_is_found():
    """As many tokens as were sampled, but not the same ones."""
    with pytest.raises(PolarError, match="c0 is in the traces twice"):
        registry.build(
            BuilderSpec(strategy=f"{__name__}:says_one_thing_twice"),
            [completion(0, [1], [2, EOT]), completion(1, [3], [4, EOT])],
        )
