"""Worked examples by hand: the paper's, and one per known weakness of prefix merging."""

from __future__ import annotations

import pytest
from attempt_maker import EOT, completion, continued

from polar.arrays import floats
from polar.completion import Completion, VersionSpan
from polar.trace import Trace, Trajectory
from reconstruction.per_request import build as per_request
from reconstruction.prefix_merging import build as prefix_merging


def sequence(t: Trace) -> list[int]:
    return [*t.prompt_ids.tolist(), *t.response_ids.tolist()]


def merge(*completions: Completion, **config) -> Trajectory:
    out = prefix_merging(list(completions), config)
    assert out.fidelity.unaccounted == 0
    for t in out.traces:
        t.check()
    return out


def test_the_papers_example():
    a = completion(0, [10], [20], finish_reason="length")
    b = completion(1, [10, 21, 22, 99, 30], [40, 99])
    out = merge(a, b, end_of_turn=[99])
    (t,) = out.traces
    assert sequence(t) == [10, 20, 99, 30, 40, 99]
    assert t.loss_mask.tolist() == [1, 0, 0, 1, 1]
    assert t.logprobs.tolist() == floats([-1.0, 0.0, 0.0, -2.0, -2.01]).tolist()
    assert [(s.start, s.end, s.exact) for s in t.segments] == [(0, 1, True), (3, 5, False)]
    f = out.fidelity
    assert (f.exact_tokens, f.inexact_tokens, f.drift_count, f.drift_tokens) == (1, 2, 1, 2)
    # 99 is also what the attempt itself shows as its end of turn.
    assert sequence(merge(a, b).traces[0]) == sequence(t)


def test_a_raw_end_of_turn_is_not_doubled():
    a = completion(0, [10], [20, 99])
    b = completion(1, [10, 21, 22, 99, 30], [40, 99])
    (t,) = merge(a, b).traces
    assert sequence(t) == [10, 20, 99, 30, 40, 99]
    assert t.loss_mask.tolist() == [1, 1, 0, 1, 1]


def test_a_literal_continuation_is_exact_and_needs_no_end_of_turn():
    a = completion(0, [1, 2], [3, 4], finish_reason="length")
    b = completion(1, [1, 2, 3, 4, 5], [6], finish_reason="length")
    out = merge(a, b)
    (t,) = out.traces
    assert sequence(t) == [1, 2, 3, 4, 5, 6]
    assert [s.exact for s in t.segments] == [True, True]
    assert out.fidelity.drift_count == 0


def test_what_comes_after_drift_stays_inexact_even_where_it_is_literal_again():
    a = completion(0, [1], [2, EOT])
    b = completion(1, [1, 3, EOT, 4], [5, EOT])
    c = completion(2, [1, 3, EOT, 4, 5, EOT, 6], [7, EOT])
    (t,) = merge(a, b, c).traces
    assert sequence(t) == [1, 2, EOT, 4, 5, EOT, 6, 7, EOT]
    assert [s.exact for s in t.segments] == [True, False, False]


@pytest.mark.parametrize("linked", ["unlinked", "to its twin", "to its twin's parent"])
def test_a_retry_is_a_sibling_and_the_continued_branch_the_chain(linked):
    a = completion(0, [1], [2, EOT])
    lost = continued(1, a, [5], [6, EOT])
    if linked == "to its twin":
        used = continued(2, lost, [], [7, EOT], prompt_shared=lost.prompt_length, link="sibling")
    elif linked == "unlinked":
        used = completion(2, [1, 2, EOT, 5], [7, EOT])
    else:
        used = continued(2, a, [5], [7, EOT], link="sibling")
    after = continued(3, used, [8], [10, EOT])
    out = merge(a, lost, used, after)
    assert [sequence(t) for t in out.traces] == [[1, 2, EOT, 5, 7, EOT, 8, 10, EOT], [1, 2, EOT, 5, 6, EOT]]
    assert out.traces[1].metadata == {"retry_of": "c2"}
    assert out.fidelity.retries == 1
    assert out.fidelity.inexact_tokens == 0


def test_a_reference_of_the_delta_encoding_is_no_parent():
    a = completion(0, [1, 2, 3], [4, EOT])
    b = continued(1, a, [7, 8], [5, EOT], prompt_shared=2, link="rewritten")
    again = continued(2, a, [7, 8], [6, EOT], prompt_shared=2, link="sibling")
    after = continued(3, again, [7], [3, EOT])
    out = merge(a, b, again, after)
    assert [[s.completion_id for s in t.segments] for t in out.traces] == [["c0"], ["c1"], ["c2", "c3"]]
    assert out.traces[1].metadata == {"retry_of": "c2"}
    assert out.fidelity.retries == 1


def test_the_last_delivered_answer_of_an_unfinished_retry_goes_on():
    a = completion(0, [1], [2, EOT])
    first = continued(1, a, [5], [6, EOT], delivered=True)
    cut = continued(2, a, [5], [7, EOT], delivered=False)
    out = merge(a, first, cut)
    assert [s.completion_id for s in out.traces[0].segments] == ["c0", "c1"]
    assert out.traces[1].metadata == {"retry_of": "c1"}


def test_an_unlinked_retry_is_continued_where_its_own_words_are_repeated():
    first, second = completion(0, [1], [2, EOT]), completion(1, [1], [3, EOT])
    after = completion(2, [1, 2, EOT, 5], [6, EOT])
    out = merge(first, second, after)
    assert [s.completion_id for s in out.traces[0].segments] == ["c0", "c2"]
    assert out.fidelity.inexact_tokens == 0


def test_no_boundary_means_a_new_trace_and_nothing_is_dropped():
    a = completion(0, [1], [2, EOT])
    b = completion(1, [1, 3, 4], [5, EOT])  # extends the prompt, but no end of turn stands in between
    c = continued(2, b, [6], [7, EOT])
    out = merge(a, b, c)
    assert [sequence(t) for t in out.traces] == [[1, 2, EOT], [1, 3, 4, 5, EOT, 6, 7, EOT]]
    assert out.traces[1].metadata == {"split": "no_end_of_turn"}


def test_an_end_marker_inside_the_sample_is_ambiguous_unless_the_prompt_repeats_it():
    a = completion(0, [1], [2, EOT, 3, EOT])
    rendered = completion(1, [1, 4, EOT, 3, EOT, 5], [6, EOT])
    assert merge(a, rendered).traces[1].metadata == {"split": "ambiguous_end_of_turn"}
    literal = completion(1, [1, 2, EOT, 3, EOT, 5], [6, EOT])
    assert len(merge(a, literal).traces) == 1


def test_an_end_marker_in_tool_text_stays_in_the_interstitial():
    a = completion(0, [1], [2, EOT])
    b = completion(1, [1, 3, EOT, 5, EOT, 6], [7, EOT])
    assert sequence(merge(a, b).traces[0]) == [1, 2, EOT, 5, EOT, 6, 7, EOT]


def test_several_end_markers_are_learned_and_stop_strings_are_not():
    a = completion(0, [1], [2, 8], finish_reason="tool_calls")
    b = completion(1, [1, 3, 8, 5], [6, 7], stop_matched="END")  # 7 is text, not a marker
    c = completion(2, [1, 3, 8, 5, 7, 4, EOT, 5], [2, EOT], stop_matched=EOT)
    (t,) = merge(a, b, c).traces
    assert sequence(t) == [1, 2, 8, 5, 6, 7, EOT, 5, 2, EOT]


def test_untrainable_and_empty_samples_are_context_and_never_trained():
    a = completion(0, [1], [2, EOT])
    bad = continued(1, a, [3], [4, EOT], untrainable="logprobs missing", logprobs=floats([]))
    none = continued(2, bad, [5], [], finish_reason="abort")
    b = continued(3, none, [6], [7, EOT])
    out = merge(a, bad, none, b)
    (t,) = out.traces
    assert sequence(t) == [1, 2, EOT, 3, 4, EOT, 5, 6, 7, EOT]
    assert t.loss_mask.tolist() == [1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert [s.exact for s in t.segments] == [True, True]
    assert out.fidelity.left_out == {"logprobs missing": 2, "empty_sample": 0}


def test_missing_logprobs_on_one_completion_leave_the_others_alone():
    a = completion(0, [1], [2, EOT], logprobs=floats([]))
    b = continued(1, a, [3], [4, EOT])
    c = continued(2, b, [5], [6, EOT], logprobs=floats([float("nan"), -1]))
    out = merge(a, b, c)
    (t,) = out.traces
    assert t.prompt_ids.tolist() == [1, 2, EOT, 3]
    assert out.fidelity.left_out == {"logprobs_misaligned": 2, "logprobs_not_finite": 2}


def test_a_side_call_does_not_take_the_conversations_place():
    a = completion(0, [1], [2, EOT], role="main")
    title = continued(1, a, [70, 71], [5, EOT], role="auxiliary")
    b = continued(2, a, [3], [4, EOT], role="main")
    c = continued(3, b, [3], [4, EOT], role="main")
    out = merge(a, title, b, c)
    assert [[s.completion_id for s in t.segments] for t in out.traces] == [["c0", "c2", "c3"], ["c1"]]
    assert [t.role for t in out.traces] == ["main", "auxiliary"]


def test_parallel_and_nested_subagents_keep_their_own_chains():
    main = completion(0, [1], [2, EOT], role="main")
    sub = [completion(1, [50], [51, EOT], role="subagent"), completion(2, [50], [52, EOT], role="subagent")]
    nested = completion(3, [60], [61, EOT], role="subagent")
    sub2 = [
        completion(4, [50, 52, EOT, 5], [6, EOT], role="subagent"),
        completion(5, [50, 51, EOT, 5], [7, EOT], role="subagent"),
    ]
    back = continued(6, main, [8], [3, EOT], role="main")
    out = merge(main, *sub, nested, *sub2, back)
    chains = [[s.completion_id for s in t.segments] for t in out.traces]
    assert chains == [["c0", "c6"], ["c1", "c5"], ["c2", "c4"], ["c3"]]
    assert out.fidelity.retries == 0


def test_compaction_starts_a_new_trace():
    a = completion(0, [1, 2, 3], [4, EOT])
    b = completion(1, [1, 77, 78], [5, EOT], link="rewritten")
    assert [sequence(t) for t in merge(a, b).traces] == [[1, 2, 3, 4, EOT], [1, 77, 78, 5, EOT]]


def test_truncation_versions_roles_and_weights():
    a = completion(0, [1], [2, 3, EOT], versions=[VersionSpan("7", 0, 2), VersionSpan("8", 2, 3)], role="main")
    b = continued(1, a, [], [5], versions=[VersionSpan("8", 0, 1)], finish_reason="abort", role="subagent")
    c = completion(2, [90], [4, EOT], versions=[VersionSpan("8", 0, 2)])
    out = merge(a, b, c)
    first, second = out.traces
    assert first.versions == [VersionSpan("7", 0, 2), VersionSpan("8", 2, 4)]
    assert (first.finish_reason, first.truncated, first.role) == ("abort", True, "unknown")
    assert (second.finish_reason, second.truncated) == ("stop", False)
    assert [t.weight for t in out.traces] == pytest.approx([4 / 6, 2 / 6])
    out = merge(a, b, c, weights="equal")
    assert [t.weight for t in out.traces] == [0.5, 0.5]


def test_per_request_gives_every_call_its_own_prompt():
    a = completion(0, [1], [2, EOT])
    b = continued(1, a, [3], [4, EOT])
    out = per_request([b, a], {})
    assert [(t.trace_id, sequence(t)) for t in out.traces] == [
        ("t.s0.a1.t0", [1, 2, EOT]),
        ("t.s0.a1.t1", [1, 2, EOT, 3, 4, EOT]),
    ]
    assert [t.prompt_ids.tolist() for t in out.traces] == [[1], [1, 2, EOT, 3]]


def test_a_completion_without_its_parent_is_left_out_with_all_that_hangs_on_it():
    a = completion(0, [1], [2, EOT])
    lost = completion(1, [3], [4, EOT])
    b = continued(2, lost, [5], [6, 7, EOT])
    c = continued(3, b, [5], [8, EOT])
    short = continued(4, a, [5], [8], prompt_shared=100)
    loop = completion(5, [], [1, EOT], parent_id="c5", prompt_shared=1)
    out = merge(a, b, c, short, loop)
    assert [sequence(t) for t in out.traces] == [[1, 2, EOT]]
    assert out.fidelity.left_out == {"corrupt_capture": 8}


def test_a_completion_stored_twice_counts_once():
    a = completion(0, [1], [2, EOT])
    out = merge(a, a)
    assert out.fidelity.completions == 1 and len(out.traces) == 1 and out.fidelity.retries == 0


def test_no_completions():
    for build in (per_request, prefix_merging):
        out = build([], {})
        assert out.traces == [] and out.fidelity.completions == 0
