"""The five laws over random conversation trees."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from attempt_maker import attempts, completion, session
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.codec import to_json
from polar.completion import Completion, resolve_prompts
from polar.trace import Trajectory
from reconstruction.per_request import build as per_request
from reconstruction.prefix_merging import build as prefix_merging
from reconstruction.tokens import Node, TokenTree, is_prefix, tokens_from
from reconstruction.trainable import reason_against
from reconstruction.tree import AttemptTree, grow

# The long run of the suite raises this.
TREES = int(os.environ.get("POLAR_TREES", "120"))
BUILDERS = pytest.mark.parametrize("build", [per_request, prefix_merging], ids=["per_request", "prefix_merging"])
trees = settings(max_examples=TREES, deadline=None)


@BUILDERS
@given(completions=attempts())
@trees
def test_conservation_and_alignment(build, completions: list[Completion]):
    out: Trajectory = build(completions, {})
    by_id = {c.completion_id: c for c in completions}
    seen = []
    for t in out.traces:
        t.check()
        for s in t.segments:
            c = by_id[s.completion_id]
            seen.append(s.completion_id)
            assert t.response_ids[s.start : s.end].tolist() == c.sampled_ids.tolist()
            assert t.logprobs[s.start : s.end].tolist() == c.logprobs.tolist()
            assert s.finish_reason == c.finish_reason
            inside = [v for v in t.versions if v.start < s.end and v.end > s.start]
            told = [(v.version, p) for v in inside for p in range(max(v.start, s.start), min(v.end, s.end))]
            assert told == [(v.version, s.start + p) for v in c.versions for p in range(v.start, v.end)]
        assert not t.logprobs[t.loss_mask == 0].any()
        assert sum(v.end - v.start for v in t.versions) == int(t.loss_mask.sum())
    assert sorted(seen) == sorted(c.completion_id for c in completions if not reason_against(c))
    f = out.fidelity
    assert f.unaccounted == 0
    assert f.sampled_tokens == sum(len(c.sampled_ids) for c in completions)
    assert f.exact_tokens + f.inexact_tokens == f.trace_tokens == sum(int(t.loss_mask.sum()) for t in out.traces)
    if out.traces:
        assert sum(t.weight for t in out.traces) == pytest.approx(1)


@BUILDERS
@given(completions=attempts())
@trees
def test_faithfulness(build, completions: list[Completion]):
    """A segment is flagged exact if and only if the model was given just these tokens before it."""
    prompts = resolve_prompts(completions)
    out: Trajectory = build(completions, {})
    inexact = 0
    for t in out.traces:
        whole = np.concatenate([t.prompt_ids, t.response_ids])
        for s in t.segments:
            context = whole[: len(t.prompt_ids) + s.start]
            assert s.exact == np.array_equal(context, prompts[s.completion_id]), s
            inexact += 0 if s.exact else s.end - s.start
        assert t.segments[0].exact and t.segments[0].start == 0
    assert inexact == out.fidelity.inexact_tokens
    if build is per_request:
        assert inexact == 0
    elif inexact:
        assert out.fidelity.drift_count > 0


@given(completions=attempts())
@trees
def test_prefix_merging_inserts_only_what_stood_in_the_next_prompt(completions: list[Completion]):
    prompts = {k: v.tolist() for k, v in resolve_prompts(completions).items()}
    for t in prefix_merging(completions, {}).traces:
        for before, after in zip(t.segments, t.segments[1:], strict=False):
            p, q = prompts[before.completion_id], prompts[after.completion_id]
            assert len(p) < len(q) and q[: len(p)] == p
            inserted = t.response_ids[before.end : after.start].tolist()
            assert q[len(q) - len(inserted) :] == inserted


@BUILDERS
@given(completions=attempts(), data=st.data())
@trees
def test_order_of_arrival_at_the_builder_does_not_matter(build, completions: list[Completion], data):
    shuffled = data.draw(st.permutations(completions))
    assert to_json(build(shuffled, {})) == to_json(build(completions, {}))


@given(completions=attempts())
@trees
def test_no_more_traces_than_per_request_and_every_split_has_a_reason(completions: list[Completion]):
    merged, single = prefix_merging(completions, {}), per_request(completions, {})
    assert len(merged.traces) <= len(single.traces)
    splits = sum("split" in t.metadata for t in merged.traces)
    assert len(merged.traces) <= merged.fidelity.chains + splits


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


def test_memory_stays_near_the_size_of_the_output():
    completions = session(128, prompt=2000, sampled=100, tool=430)
    prefix_merging(completions[:8], {})
    tracemalloc.start()
    out = prefix_merging(completions, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    (t,) = out.traces
    size = t.prompt_ids.nbytes + t.response_ids.nbytes + t.loss_mask.nbytes + t.logprobs.nbytes
    assert peak <= 2 * size
