from __future__ import annotations

import math

import numpy as np
import pytest
from attempt_maker import EOT, attempts, completion
from hypothesis import given, settings
from hypothesis import strategies as st

from polar.errors import EvaluatorError
from polar.export import rows
from polar.result import Evaluation, SessionResult
from reconstruction import rewards
from reconstruction.advantages import group_advantages, session_advantages
from reconstruction.exact import build as exact
from reconstruction.per_request import build
from reconstruction.prefix_merging import build as merging
from reconstruction.reductions import coefficients
from reconstruction.tree_packing import build as tree


def trajectory(n: int, build=build):
    return build([completion(i, [i], [5, EOT]) for i in range(n)], {})


def result(task: str = "t", **kw) -> SessionResult:
    kw = {"termination": "finished", "verdict": "passed", "trajectory": trajectory(1)} | kw
    return SessionResult(session_id="s", task_id=task, sample_index=0, attempt=1, **kw)


@pytest.mark.parametrize(
    ("evaluation", "expected"),
    [
        (Evaluation(verdict="passed", outcome_reward=1.0), [1.0, 1.0]),
        (Evaluation(verdict="partial", outcome_reward=0.5, trace_rewards=[0.25, None]), [0.25, 0.5]),
        (Evaluation(verdict="partial", trace_rewards=[0.25, None]), [0.25, None]),
        (Evaluation(verdict="not_evaluated"), [None, None]),
        # An infrastructure failure is never a zero, even if someone wrote one.
        (Evaluation(verdict="evaluator_error", outcome_reward=0.0), [None, None]),
    ],
)
def test_rewards(evaluation, expected):
    t = trajectory(2)
    rewards.apply(t, evaluation)
    assert [x.reward for x in t.traces] == expected


@pytest.mark.parametrize(
    "evaluation",
    [
        Evaluation(verdict="passed", trace_rewards=[1.0]),
        Evaluation(verdict="passed", outcome_reward=math.nan),
        Evaluation(verdict="passed", outcome_reward=1.0, trace_rewards=[1.0, math.inf]),
    ],
)
def test_bad_rewards_are_refused_and_nothing_is_set(evaluation):
    t = trajectory(2)
    with pytest.raises(EvaluatorError) as e:
        rewards.apply(t, evaluation)
    assert not e.value.retryable
    assert [x.reward for x in t.traces] == [None, None]


def test_advantages_by_hand():
    a = group_advantages([1.0, 0.0, None, 0.0, 0.0])
    assert a.values == pytest.approx([math.sqrt(3), -1 / math.sqrt(3), None, -1 / math.sqrt(3), -1 / math.sqrt(3)])
    assert (a.used, a.excluded, a.mean, a.degenerate) == (4, 1, 0.25, False)
    b = group_advantages([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out", scale="none")
    assert b.values == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    # One winner: finite, though the others have no spread at all.
    c = group_advantages([1.0, 0.0, 0.0, 0.0], baseline="leave_one_out")
    assert all(abs(v) < 3 for v in c.values)


@pytest.mark.parametrize("group", [[], [None], [0.7], [1.0, None], [0.3, 0.3, 0.1 + 0.2]])
def test_a_group_without_spread_gets_zeros(group):
    a = group_advantages(group)
    assert a.degenerate and a.values == [None if r is None else 0.0 for r in group]


def test_what_is_not_a_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        group_advantages([math.nan, 1.0])
    with pytest.raises(ValueError, match="baseline"):
        group_advantages([1.0], baseline="median")  # type: ignore[arg-type]


@given(
    st.lists(st.none() | st.floats(-100, 100), max_size=12),
    st.sampled_from(["mean", "leave_one_out"]),
    st.sampled_from(["std", "none"]),
)
def test_advantages_are_centred_ordered_and_finite(group, baseline, scale):
    a = group_advantages(group, baseline=baseline, scale=scale)
    judged = [(r, v) for r, v in zip(group, a.values, strict=True) if r is not None]
    assert [v is None for v in a.values] == [r is None for r in group]
    assert all(math.isfinite(v) for _, v in judged)
    assert sum(v for _, v in judged) == pytest.approx(0, abs=1e-6)
    if not a.degenerate:
        order = np.argsort([r for r, _ in judged], kind="stable")
        assert all(np.diff([judged[i][1] for i in order]) >= -1e-9)


def test_infrastructure_failures_are_excluded_and_counted():
    group = [
        result(reward=1.0),
        result(reward=0.0, verdict="failed"),
        result(reward=0.0, termination="infra_error"),  # never a zero, even if someone wrote one
        result(reward=None, verdict="evaluator_error"),
        result(reward=None, verdict="not_evaluated", termination="cancelled"),
        result(reward=None, verdict="not_evaluated"),
        result(reward=None, verdict="partial"),
        result(reward=0.0, verdict="failed", termination="agent_timeout"),
    ]
    a = session_advantages(group, baseline="leave_one_out", scale="none")
    assert a.values == [1.0, -0.5, None, None, None, None, None, -0.5]
    assert a.excluded_by == {
        "cancelled": 1,
        "evaluator_error": 1,
        "infra_error": 1,
        "not_evaluated": 1,
        "not_judged": 1,
    }
    assert (a.used, a.excluded) == (3, 5)
    with pytest.raises(ValueError, match="one task's"):
        session_advantages([result(), result("u")])


def test_both_reductions_by_hand():
    long, short = trajectory(3), trajectory(1)  # 6 and 2 trained tokens
    assert coefficients([long, None, short]) == [pytest.approx([1 / 12] * 3), [], pytest.approx([1 / 4])]
    assert coefficients([long, None, short], "token_mean") == [pytest.approx([1 / 8] * 3), [], pytest.approx([1 / 8])]
    assert coefficients([None, trajectory(0)]) == [[], []]
    with pytest.raises(ValueError, match="session_mean, token_mean"):
        coefficients([], "mean")  # type: ignore[arg-type]


@given(attempt=attempts(), other=attempts(), reduction=st.sampled_from(["session_mean", "token_mean"]))
@settings(max_examples=100)
def test_the_loss_does_not_depend_on_the_builder(attempt, other, reduction):
    """Any loss of a token, summed with the coefficients, is the same however many traces a session fell into."""
    losses = set()
    for builder in (build, merging, exact, tree):
        sessions = [builder(attempt, {}), builder(other, {})]
        total, trained = 0.0, 0.0
        for session, factors in zip(sessions, coefficients(sessions, reduction), strict=True):
            for trace, factor in zip(rows(session), factors, strict=True):
                total += factor * float(trace.logprobs[trace.loss_mask == 1].sum(dtype=np.float64))
                trained += factor * int(trace.loss_mask.sum())
                if reduction == "session_mean":  # the weights on the traces say the same
                    voters = sum(bool(rows(s)) for s in sessions)
                    assert factor == pytest.approx(trace.weight / int(trace.loss_mask.sum()) / voters)
        losses.add(round(total, 9))
        assert trained == pytest.approx(1 if any(rows(s) for s in sessions) else 0)
    assert len(losses) == 1
