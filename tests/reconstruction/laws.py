"""The laws of reconstruction, each as a function that fails on any attempt that breaks it."""

from __future__ import annotations

import random

import numpy as np
from attempt_maker import without_order

from polar.codec import pack, to_json, unpack
from polar.completion import Completion, resolve_prompts
from polar.export import rows
from polar.trace import Trajectory
from reconstruction.exact import build as exact
from reconstruction.per_request import build as per_request
from reconstruction.prefix_merging import build as prefix_merging
from reconstruction.trainable import reason_against
from reconstruction.tree_packing import build as tree

BUILDERS = {b.name: b for b in (per_request, prefix_merging, exact, tree)}


def conservation_and_alignment(out: Trajectory, completions: list[Completion]) -> None:
    """Every sampled token is in exactly one place, with its own logprob, version and index, or counted under a reason."""
    by_id = {c.completion_id: c for c in completions}
    seen = []
    traces = rows(out)
    for t in traces:
        t.check()
        index, exact_mask, (names, version) = t.completion_index(), t.exact_mask(), t.policy_versions()
        for s in t.segments:
            c = by_id[s.completion_id]
            here = slice(s.start, s.end)
            seen.append(s.completion_id)
            assert t.response_ids[here].tolist() == c.sampled_ids.tolist()
            assert t.logprobs[here].tolist() == c.logprobs.tolist()
            assert (s.finish_reason, s.index, s.role) == (c.finish_reason, c.index, c.role)
            assert (index[here] == c.index).all() and (exact_mask[here] == s.exact).all()
            told = [v.version for v in c.versions for _ in range(v.start, v.end)]
            assert [names[v] for v in version[here]] == told
        masked = t.loss_mask == 0
        assert not t.logprobs[masked].any() and not exact_mask[masked].any()
        assert (index[masked] == -1).all() and (version[masked] == -1).all()
        assert t.finish_reason == by_id[t.segments[-1].completion_id].finish_reason
        assert t.truncated == (t.finish_reason in ("length", "abort", "error"))
    trainable = [c for c in completions if not reason_against(c)]
    assert sorted(seen) == sorted(c.completion_id for c in trainable)
    f = out.fidelity
    trained = sum(int(t.loss_mask.sum()) for t in traces)
    assert f.unaccounted == 0
    assert f.completions == len(completions)
    assert f.sampled_tokens == sum(len(c.sampled_ids) for c in completions)
    assert f.exact_tokens + f.inexact_tokens == f.trace_tokens == trained
    assert f.exact_tokens == sum(int(t.exact_mask().sum()) for t in traces)
    assert sum(f.untrainable.values()) == len(completions) - len(trainable)
    assert f.untrainable.keys() == f.left_out.keys()
    assert sum(sum(t.left_out.values()) for t in traces) <= sum(f.left_out.values())
    assert f.traces == (len(out.traces) if out.packed is None else bool(trainable))
    assert f.merge_factor == (len(trainable) / f.traces if f.traces else 0)
    if traces:
        assert abs(sum(t.weight for t in traces) - 1) < 1e-9


def faithfulness(out: Trajectory, prompts: dict[str, np.ndarray]) -> None:
    """A segment is flagged exact if and only if the model was given just these tokens before it."""
    inexact = 0
    for t in rows(out):
        whole = np.concatenate([t.prompt_ids, t.response_ids])
        for s in t.segments:
            context = whole[: len(t.prompt_ids) + s.start]
            assert s.exact == np.array_equal(context, prompts[s.completion_id]), s
            inexact += 0 if s.exact else s.end - s.start
        assert t.segments[0].exact and t.segments[0].start == 0
    f = out.fidelity
    assert inexact == f.inexact_tokens
    if out.builder != "prefix_merging":
        assert inexact == 0
    elif inexact:
        assert f.drift_count > 0
    splits = sum("split" in t.metadata for t in out.traces)
    assert splits == sum(f.splits.values())
    if out.builder in ("prefix_merging", "exact"):
        assert len(out.traces) <= f.chains + splits  # every further trace has a reason


def insertions(out: Trajectory, prompts: dict[str, np.ndarray]) -> None:
    """What stands between two segments stood at the end of the next original prompt."""
    for t in out.traces:
        for before, after in zip(t.segments, t.segments[1:], strict=False):
            p, q = prompts[before.completion_id], prompts[after.completion_id]
            assert len(p) < len(q) and np.array_equal(q[: len(p)], p)
            inserted = t.response_ids[before.end : after.start]
            assert np.array_equal(q[len(q) - len(inserted) :], inserted)


def packing(packed: Trajectory, single: Trajectory) -> None:
    """The packed tree holds each prompt prefix once and gives back exactly what `per_request` makes."""
    tree_ = packed.packed
    assert tree_ is not None
    tree_.check()
    assert [to_json(t) for t in rows(packed)] == [to_json(t) for t in single.traces]
    ends = tree_.subtree_ends()
    for c in tree_.calls:
        context = np.concatenate([np.arange(s.start, s.stop) for s in tree_.path(c.end - 1)])
        at = [c.end - 1]
        while tree_.parents[at[-1]] >= 0:
            at.append(int(tree_.parents[at[-1]]))
        assert context.tolist() == at[::-1]
        assert tree_.positions[context].tolist() == list(range(len(context)))
        # Attention by stretches is attention by ancestors.
        looks = np.flatnonzero(ends[: c.end] > c.end - 1)
        assert looks.tolist() == context.tolist()
    read = {tuple(ids[:n]) for c in tree_.calls for ids in [tree_.prompt(c).tolist()] for n in range(1, len(ids) + 1)}
    assert int((tree_.loss_mask == 0).sum()) <= len(read)
    again = unpack(pack(packed), Trajectory)
    assert pack(again) == pack(packed)


def check_all(completions: list[Completion], seed: int = 0) -> None:
    prompts = resolve_prompts(completions)
    built = {name: build(completions, {}) for name, build in BUILDERS.items()}
    shuffled = completions[:]
    random.Random(seed).shuffle(shuffled)
    for name, out in built.items():
        conservation_and_alignment(out, completions)
        faithfulness(out, prompts)
        insertions(out, prompts)
        assert pack(BUILDERS[name](shuffled, {})) == pack(out), "order of arrival at the builder"
    packing(built["tree"], built["per_request"])
    counts = {name: len(out.traces) for name, out in built.items()}
    assert counts["prefix_merging"] <= counts["exact"] <= counts["per_request"]
    f = built["exact"].fidelity, built["prefix_merging"].fidelity
    assert (f[0].drift_count, f[0].retries, f[0].chains) == (f[1].drift_count, f[1].retries, f[1].chains)


def check_without_order(completions: list[Completion], seed: int = 0) -> None:
    """Equal timestamps and indices: the result depends on the completions only, and keeps every law."""
    rng = random.Random(seed)
    prompts = resolve_prompts(completions)
    one, two = without_order(completions, rng.shuffle), without_order(completions, rng.shuffle)
    for build in BUILDERS.values():
        out = build(one, {})
        assert pack(build(two, {})) == pack(out)
        conservation_and_alignment(out, one)
        faithfulness(out, prompts)
