"""Worked examples of `exact` and `tree`, one per known weakness of prefix merging."""

from __future__ import annotations

import numpy as np
import pytest
from attempt_maker import EOT, completion, continued

from polar.arrays import floats
from polar.completion import Completion, VersionSpan
from polar.export import rows
from polar.packed import Run, structure
from polar.trace import Trajectory
from reconstruction.exact import build as exact
from reconstruction.per_request import build as per_request
from reconstruction.prefix_merging import build as prefix_merging
from reconstruction.tree_packing import build as tree


def chains(out: Trajectory) -> list[list[str]]:
    return [[s.completion_id for s in t.segments] for t in out.traces]


def sequences(out: Trajectory) -> list[list[int]]:
    return [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in out.traces]


def build(*completions: Completion) -> Trajectory:
    out = exact(list(completions), {})
    assert out.fidelity.inexact_tokens == 0 and out.fidelity.unaccounted == 0
    return out


def test_the_papers_example_is_two_traces():
    a = completion(0, [10], [20], finish_reason="length")
    b = completion(1, [10, 21, 22, 99, 30], [40, 99])
    out = build(a, b)
    assert sequences(out) == [[10, 20], [10, 21, 22, 99, 30, 40, 99]]
    assert [t.loss_mask.tolist() for t in out.traces] == [[1], [1, 1]]
    assert out.traces[1].metadata == {"split": "drift"}
    f = out.fidelity
    assert (f.splits, f.drift_count, f.drift_tokens, f.exact_tokens, f.merge_factor) == ({"drift": 1}, 1, 2, 3, 1.0)


def test_an_sdk_retry_with_an_equal_prompt_ends_no_chain():
    a = completion(0, [1], [2, EOT])
    lost = completion(1, [1, 2, EOT, 5], [6, EOT])
    used = completion(2, [1, 2, EOT, 5], [7, EOT])
    after = completion(3, [1, 2, EOT, 5, 7, EOT, 8], [3, EOT])
    out = build(a, lost, used, after)
    assert chains(out) == [["c0", "c2", "c3"], ["c1"]]
    assert out.traces[1].metadata == {"retry_of": "c2"} and out.fidelity.retries == 1


def test_a_break_in_the_middle_keeps_what_follows_and_merges_on():
    a = completion(0, [1], [2, EOT])
    b = completion(1, [1, 3, 4], [5, EOT])  # no end of turn: prefix merging finds no boundary either
    c, d = continued(2, b, [6], [7, EOT]), completion(3, [1, 3, 4, 5, EOT, 6, 8, EOT, 6], [7, EOT])
    out = build(a, b, c, d)
    assert chains(out) == [["c0"], ["c1", "c2"], ["c3"]]
    assert [t.metadata.get("split") for t in out.traces] == [None, "no_end_of_turn", "drift"]
    assert out.fidelity.splits == {"no_end_of_turn": 1, "drift": 1}


@pytest.mark.parametrize(
    "following",
    [[1, 7, EOT, 5], [1, EOT, 5], [1, 2, 3, 3, EOT, 5], [1, 5]],
    ids=["rewritten", "stripped", "edited", "dropped"],
)
def test_no_token_is_trained_behind_a_turn_that_the_model_never_saw(following):
    a, b = completion(0, [1], [2, 3, EOT]), completion(1, following, [6, EOT])
    out = build(a, b)
    assert sequences(out) == [[1, 2, 3, EOT], [*following, 6, EOT]]
    assert out.fidelity.drift_count == 1
    merged = prefix_merging([a, b], {})
    flagged = [s.exact for t in merged.traces for s in t.segments if s.completion_id == "c1"]
    assert flagged == [len(merged.traces) == 2]  # merged and flagged, or split


def test_end_markers_and_stop_strings_need_no_care_where_the_prompt_repeats_the_sample():
    a = completion(0, [1], [2, 8], finish_reason="tool_calls", stop_matched=8)
    b = continued(1, a, [5], [6, 7], stop_matched="END")
    c = continued(2, b, [EOT, 5, EOT, 8, 4], [2, EOT, 3, EOT], stop_matched=EOT)  # markers in the tool's text
    d = continued(3, c, [5], [4, EOT])
    out = build(a, b, c, d)
    assert chains(out) == [["c0", "c1", "c2", "c3"]]
    assert out.traces[0].loss_mask.tolist() == [1, 1, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]


def test_parallel_and_nested_subagents_and_auxiliary_calls():
    main = completion(0, [1], [2, EOT], role="main")
    title = completion(1, [1, 2, EOT, 70], [5, EOT], role="auxiliary")
    one, two = (completion(i, [50, i], [51, EOT], role="subagent") for i in (2, 3))
    nested = completion(4, [50, 2, 51, EOT, 60], [61, EOT], role="subagent")
    two_on, one_on = (
        continued(5, two, [8], [9, EOT], role="subagent"),
        continued(6, one, [8], [9, EOT], role="subagent"),
    )
    one_end = continued(7, one_on, [8], [9, EOT], role="subagent")
    back = continued(8, main, [8], [3, EOT], role="main")
    out = build(main, title, one, two, nested, two_on, one_on, one_end, back)
    assert chains(out) == [["c0", "c8"], ["c1"], ["c2", "c6", "c7"], ["c3", "c5"], ["c4"]]
    assert [t.role for t in out.traces] == ["main", "auxiliary", "subagent", "subagent", "subagent"]


def test_a_compaction_call_and_what_comes_after_it():
    a = completion(0, [1, 2], [3, EOT], role="main")
    summary = continued(1, a, [80], [81, EOT], role="compaction")
    after = completion(2, [1, 81, 5], [6, EOT], role="main")
    out = build(a, summary, after)
    assert chains(out) == [["c0", "c1"], ["c2"]]
    assert [s.role for s in out.traces[0].segments] == ["main", "compaction"] and out.traces[0].role == "unknown"


def test_a_conversation_is_not_lost_to_a_side_call_that_came_first():
    a = completion(0, [1], [2, EOT], role="main")
    side = continued(1, a, [70], [5, EOT], role="subagent")
    longer = continued(2, side, [70], [5, EOT], role="subagent")
    last = continued(3, a, [8], [3, EOT], role="main")
    assert chains(build(a, side, longer, last)) == [["c0", "c3"], ["c1", "c2"]]


@pytest.mark.parametrize("reason", ["length", "abort"])
def test_truncated_and_aborted_responses_go_on_where_the_prompt_repeats_them(reason):
    a = completion(0, [1], [2, 3], finish_reason=reason)
    b = continued(1, a, [EOT, 5], [6, EOT])
    out = build(a, b)
    assert chains(out) == [["c0", "c1"]] and not out.traces[0].truncated
    assert [s.finish_reason for s in out.traces[0].segments] == [reason, "stop"]
    assert build(a).traces[0].truncated and build(a).traces[0].finish_reason == reason


def test_missing_logprobs_of_one_completion_leave_the_others_alone():
    a = completion(0, [1], [2, EOT])
    bad = continued(1, a, [3], [4, EOT], untrainable="logprobs_missing", logprobs=floats([]))
    b = continued(2, bad, [6], [7, EOT])
    alone = completion(3, [90], [4, EOT], untrainable="logprobs_missing", logprobs=floats([]))
    out = build(a, bad, b, alone)
    (t,) = out.traces
    assert t.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 1, 1] and t.left_out == {"logprobs_missing": 2}
    assert t.logprobs[t.loss_mask == 1].tolist() == [*a.logprobs.tolist(), *b.logprobs.tolist()]
    assert out.fidelity.left_out == {"logprobs_missing": 4} and out.fidelity.untrainable == {"logprobs_missing": 2}
    assert out.traces[0].completion_index().tolist() == [0, 0, -1, -1, -1, -1, 2, 2]


def test_a_capture_without_continuity_gives_the_same_traces_as_a_linked_one():
    a = completion(0, [1], [2, EOT])
    b = continued(1, a, [5], [6, EOT])
    c = continued(2, b, [7], [8, EOT])
    bare = [
        completion(0, [1], [2, EOT]),
        completion(1, [1, 2, EOT, 5], [6, EOT]),
        completion(2, [1, 2, EOT, 5, 6, EOT, 7], [8, EOT]),
    ]
    assert sequences(exact(bare, {})) == sequences(build(a, b, c)) == [[1, 2, EOT, 5, 6, EOT, 7, 8, EOT]]


def test_per_token_facts():
    a = completion(0, [10], [20], finish_reason="length", versions=[VersionSpan("7", 0, 1)])
    b = completion(1, [10, 21, 99, 30], [40, 99], versions=[VersionSpan("7", 0, 1), VersionSpan("8", 1, 2)])
    (t,) = prefix_merging([a, b], {"end_of_turn": [99]}).traces
    assert t.response_ids.tolist() == [20, 99, 30, 40, 99]
    assert t.exact_mask().tolist() == [1, 0, 0, 0, 0]
    assert t.completion_index().tolist() == [0, -1, -1, 1, 1]
    names, versions = t.policy_versions()
    assert names == ["7", "8"] and versions.tolist() == [0, -1, -1, 0, 1]


def test_the_packed_tree_by_hand():
    a = completion(0, [1, 2], [3, EOT])
    lost = continued(1, a, [5], [6, EOT])
    used = continued(2, a, [5], [7, EOT], link="sibling")
    drift = completion(3, [1, 2, 3, 4], [8, EOT])  # leaves the sample of c0 after its first token
    other = completion(4, [30], [31])
    out = tree([a, lost, used, drift, other], {})
    p = out.packed
    assert p is not None and out.traces == []
    p.check()
    #                         0  1  2  3    4  5  6    7  8    9  10 11   12  13
    assert p.ids.tolist() == [1, 2, 3, EOT, 5, 6, EOT, 7, EOT, 4, 8, EOT, 30, 31]
    assert p.parents.tolist() == [-1, 0, 1, 2, 3, 4, 5, 4, 7, 2, 9, 10, -1, 12]
    assert p.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 5, 6, 3, 4, 5, 0, 1]
    assert p.loss_mask.tolist() == [0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1]
    assert p.subtree_ends().tolist() == [12, 12, 12, 9, 9, 7, 7, 9, 9, 12, 12, 12, 14, 14]
    assert p.runs[:4] == [Run(0, 2, -1), Run(2, 4, 1, 0), Run(4, 5, 3), Run(5, 7, 4, 1)]
    assert np.flatnonzero(p.attention_mask()[8]).tolist() == [0, 1, 2, 3, 4, 7, 8]
    f = out.fidelity
    assert (f.traces, f.merge_factor, f.stored_tokens, f.trace_tokens, f.exact_tokens) == (1, 5.0, 14, 9, 9)
    single = per_request([a, lost, used, drift, other], {})
    assert [t.prompt_ids.tolist() for t in rows(out)] == [t.prompt_ids.tolist() for t in single.traces]
    assert single.fidelity.stored_tokens == 4 + 7 + 7 + 6 + 2


def test_equal_samples_of_one_prompt_are_each_trained_once():
    a, again = completion(0, [1], [2, EOT]), completion(1, [1], [2, EOT])
    after = completion(2, [1, 2, EOT, 5], [6, EOT])
    p = tree([a, again, after], {}).packed
    assert p is not None
    p.check()
    assert p.ids.tolist() == [1, 2, EOT, 5, 6, EOT, 2, EOT] and p.loss_mask.tolist() == [0, 1, 1, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("fault", ["order", "mask", "position", "gap"])
def test_a_broken_packed_tree_is_refused(fault):
    a = completion(0, [1, 2], [3, EOT])
    b, c = continued(1, a, [5], [6, EOT]), continued(2, a, [7], [8, EOT])
    p = tree([a, b, c], {}).packed
    assert p is not None
    p.check()
    if fault == "order":  # the last branch claims a parent inside the branch before it, which is closed by then
        p.runs[2:] = [Run(4, 5, 3), Run(5, 7, 4, 1), Run(7, 8, 3), Run(8, 10, 5, 2)]
    elif fault == "mask":
        p.loss_mask[0] = 1
    elif fault == "position":
        p.positions[-1] += 1
    else:
        p.runs.pop()
    with pytest.raises(ValueError, match="packed tree"):
        p.check()


def test_no_completions():
    out = tree([], {})
    assert out.packed is not None and len(out.packed.ids) == 0 and rows(out) == [] and out.fidelity.traces == 0
    out.packed.check()
    assert exact([], {}).traces == []


def test_a_branch_from_what_is_closed_is_no_depth_first_order():
    structure([Run(0, 3, -1), Run(3, 5, 2), Run(5, 6, 0)], 6)
    with pytest.raises(ValueError, match="run 5:6 after token 2"):  # token 2 was left behind by the branch at token 0
        structure([Run(0, 3, -1), Run(3, 5, 0), Run(5, 6, 2)], 6)


def test_a_linked_capture_without_order_keeps_its_chain():
    """Equal indices, and the child's id comes before its parent's."""
    a = completion(0, [1], [2, EOT], completion_id="z")
    b = continued(0, a, [5], [6, EOT], completion_id="a")
    assert chains(build(b, a)) == chains(build(a, b)) == [["z", "a"]]


def test_among_equal_successors_the_one_that_repeats_the_sample_goes_on():
    a = completion(0, [1], [2, EOT])
    edited, true = completion(1, [1, 3, EOT, 5], [6, EOT]), completion(2, [1, 2, EOT, 5], [6, EOT])
    assert chains(build(a, edited, true)) == [["c0", "c2"], ["c1"]]


def test_a_call_that_gave_no_hint_of_its_role_goes_with_its_conversation():
    a = completion(0, [1], [2, EOT], role="main")
    (t,) = build(a, continued(1, a, [5], [6, EOT])).traces
    assert t.role == "main" and [s.role for s in t.segments] == ["main", "unknown"]
