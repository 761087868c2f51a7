"""The five laws over random conversation trees."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from attempt_maker import attempts, completion, seeded_attempt, session
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import BUILDERS, check_all, check_without_order

from benchmarks import rebuild as rebuild_benchmark
from polar.completion import Completion, resolve_prompts
from reconstruction.prefix_merging import build as prefix_merging
from reconstruction.tokens import Node, TokenTree, is_prefix, tokens_from
from reconstruction.tree import AttemptTree, grow

# How many trees the long run checks, in shards of which each can be run alone.
TREES = int(os.environ.get("POLAR_TREES", "100000"))
SHARDS = 20
trees = settings(max_examples=200, deadline=None)


@given(completions=attempts(), seed=st.integers(0, 9))
@trees
def test_the_laws(completions: list[Completion], seed: int):
    check_all(completions, seed)


@given(completions=attempts(), seed=st.integers(0, 9))
@trees
def test_the_laws_under_equal_timestamps(completions: list[Completion], seed: int):
    check_without_order(completions, seed)


@pytest.mark.parametrize("shard", range(3))
def test_the_laws_over_seeded_trees(shard: int):
    run_seeds(range(100 * shard, 100 * (shard + 1)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("shard", range(SHARDS))
def test_the_laws_in_the_long_run(shard: int):
    run_seeds(range(1000 + shard, 1000 + TREES, SHARDS))


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        completions = seeded_attempt(seed)
        try:
            check_all(completions, seed)
            check_without_order(completions, seed)
        except Exception as e:
            raise AssertionError(f"seed {seed} breaks a law: {e}") from e


@given(completions=attempts())
@trees
def test_the_tree(completions: list[Completion]):
    tree = grow(completions)
    prompts = resolve_prompts(completions)
    for call in tree.calls:
        assert tokens_from(call.prompt, 0).tolist() == prompts[call.completion.completion_id].tolist()
        assert tokens_from(call.full, call.prompt.depth).tolist() == call.sampled.tolist()
        longest = max(
            (len(prompts[o.completion.completion_id]) for o in tree.calls[: call.order] if _strict(o, call)),
            default=None,
        )
        if call.parent is None:
            assert longest is None or call.completion.link == "sibling"
        else:
            assert call.parent.order < call.order and _strict(call.parent, call)
            if call.completion.link not in ("continued", "sibling"):
                assert call.parent.prompt.depth == longest
    chained = [call for chain in tree.chains() for call in chain]
    assert sorted(c.order for c in chained) == [c.order for c in tree.calls]


def _strict(a, b) -> bool:
    return a.prompt is not b.prompt and is_prefix(a.prompt, b.prompt)


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=20))
def test_the_token_tree_holds_each_sequence_once(sequences: list[list[int]]):
    tree = TokenTree()
    ends: dict[tuple[int, ...], Node] = {}
    for s in sequences:
        end = tree.insert(tree.root, np.array(s, dtype=np.int32))
        assert ends.setdefault(tuple(s), end) is end
    for s, end in ends.items():
        assert tuple(tokens_from(end, 0).tolist()) == s
        for other, other_end in ends.items():
            assert is_prefix(other_end, end) == (s[: len(other)] == other)


def _cost(completions: list[Completion]) -> tuple[int, AttemptTree]:
    tree = grow(completions)
    return tree.tokens.compared, tree


def test_cost_is_linear_in_turns():
    """Tokens compared grow with the captured tokens, not with turns times prompt length."""
    for turns in (16, 64, 256):
        completions = session(turns, prompt=500, sampled=30, tool=70)
        captured = sum(len(c.prompt_tail) + len(c.sampled_ids) for c in completions)
        compared, tree = _cost(completions)
        assert compared <= captured
        assert len(tree.chains()) == 1


def test_cost_without_recorded_parents_is_linear_in_what_was_captured():
    linked = session(64, prompt=500, sampled=30, tool=70)
    prompts = resolve_prompts(linked)
    bare = [completion(c.index, prompts[c.completion_id].tolist(), c.sampled_ids.tolist()) for c in linked]
    compared, tree = _cost(bare)
    assert compared <= 2 * sum(c.prompt_length + len(c.sampled_ids) for c in bare)
    assert len(tree.chains()) == 1
    out = prefix_merging(bare, {})
    assert len(out.traces) == 1 and out.fidelity.inexact_tokens == 0


@pytest.mark.parametrize("name", ["exact", "prefix_merging", "tree"])
def test_memory_stays_near_the_size_of_the_output(name: str):
    completions = session(128, prompt=2000, sampled=100, tool=430)
    build = BUILDERS[name]
    build(completions[:8], {})
    tracemalloc.start()
    out = build(completions, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (t,) = [out.packed] if out.packed else out.traces
    arrays = [getattr(t, f) for f in t.__struct_fields__ if isinstance(getattr(t, f), np.ndarray)]
    assert peak <= 2 * sum(a.nbytes for a in arrays)


def test_the_benchmark_compares_with_the_paper_on_a_session_of_the_judged_shape():
    r = rebuild_benchmark.measure(128, 70_000, repeat=1)
    assert r["turns"] == 128 and abs(r["tokens"] - 70_000) < 200
    assert r["per_request_traces"] >= 5.4 * r["traces"] and r["peak_over_output"] <= 2
    assert r.keys() >= {"ms", "naive_ms", "slope_ratio_8_to_512"}
