"""Nothing that an evaluator does, or an agent through it, loses a verdict or makes one."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from polar.codec import unpack
from polar.errors import EvaluatorError, InfraError
from polar.judge import Outcome
from polar.result import Evaluation
from polar.sandbox import LABEL_PURPOSE, SandboxRef
from polar.task import EvaluatorSpec
from runtimes.local import LocalRuntime
from tests.workers.cluster import Cluster, noop, until
from tests.workers.test_run_failures import admitted, ended, left
from workers import judging
from workers.context import Context
from workers.init import init
from workers.postrun import postrun
from workers.report import RunReport
from workers.run import run


def ran(ctx: Context, name: str, evaluator: EvaluatorSpec, **kw) -> str:
    sid = admitted(ctx, noop(name, evaluator=evaluator, **kw))
    init(ctx, sid)
    run(ctx, sid)
    assert ctx.store.session(sid).state == "POSTRUN"
    return sid


def prewarmed(ctx: Context, sid: str) -> SandboxRef:
    return unpack(unpack(ctx.store.session(sid).run_report, RunReport).prewarmed, SandboxRef)


# -- a sandbox made beside RUN

UNUSED = EvaluatorSpec(
    name="test_on_output", prewarm=True, max_attempts=1, config={"command": "test ! -e used && touch used"}
)


def test_a_prewarmed_sandbox_is_used_once(ctx):
    sid = ran(ctx, "fresh", UNUSED)
    ref = prewarmed(ctx, sid)
    s = ctx.store.begin(sid, "postrun", "a", "dead", 60.0)
    ctx.runtime("local").attach(ref).exec("touch used", timeout=60)
    ctx.store.release(sid, s.fence)  # as the reaper does it for a worker that died
    r = ended(ctx, sid)
    assert (r.verdict, r.reward, r.evaluation.attempts) == ("passed", 1.0, 1)
    assert left(ctx) == []


def test_a_prewarmed_sandbox_that_is_whole_is_taken(ctx):
    sid = ran(ctx, "warm", UNUSED)
    ctx.runtime("local").attach(prewarmed(ctx, sid)).exec("touch used", timeout=60)
    assert (ended(ctx, sid).verdict, left(ctx)) == ("failed", [])


@pytest.mark.parametrize("how", ["gone", "unattachable"])
def test_a_prewarmed_sandbox_that_fails_costs_no_try(ctx, monkeypatch, how):
    sid = ran(ctx, how, UNUSED)
    if how == "gone":
        ctx.runtime("local").attach(prewarmed(ctx, sid)).destroy()
    else:
        whole = LocalRuntime.attach

        def attach(self, ref: SandboxRef):
            if ref.labels[LABEL_PURPOSE] == "evaluation":
                raise InfraError("can't be reached")
            return whole(self, ref)

        monkeypatch.setattr(LocalRuntime, "attach", attach)
    r = ended(ctx, sid)
    assert (r.verdict, r.reward, r.evaluation.attempts) == ("passed", 1.0, 1)


def test_a_kill_amid_an_evaluation_costs_no_verdict(tmp_path):
    go, begun = tmp_path / "go", tmp_path / "begun"
    command = f"test ! -e used || exit 1; touch used {begun}; until [ -e {go} ]; do sleep 0.1; done"
    with Cluster(tmp_path / "c") as c:
        c.workers()
        spec = EvaluatorSpec(name="test_on_output", prewarm=True, config={"command": command})
        (task,) = c.submit(noop("killed", evaluator=spec))
        until(begun.exists)
        os.kill(c.processes["worker-postrun-a"].popen.pid, signal.SIGKILL)
        go.touch()
        (r,) = c.wait([task])
        assert (r.verdict, r.reward) == ("passed", 1.0)
        assert c.store.session("killed.s0").postrun_tries == 2


# -- what an agent's files say


def test_a_name_that_is_no_utf8_escapes_no_judgement(ctx):
    config = {"command": "false", "collect": ["d"]}
    command = "n=d/$(printf 'a\\377'); mkdir -p $n; touch $n/conftest.py"
    sid = ran(ctx, "names", EvaluatorSpec(name="test_on_output", config=config), command=command)
    r = ended(ctx, sid)
    assert (r.verdict, r.reward) == ("failed", 0.0)
    assert r.evaluation.report["protected"] == ["d/a\\udcff/conftest.py"]


class Says:
    """Answers as the test named in its config wants it."""

    name = "says"
    needs_sandbox = False
    collects = ()
    over: ClassVar[threading.Event] = threading.Event()
    late: ClassVar[list[BaseException]] = []
    done: ClassVar[threading.Event] = threading.Event()

    def __init__(self, what: str):
        self.what = what

    @classmethod
    def from_config(cls, config):
        return cls(config["what"])

    def evaluate(self, outcome: Outcome) -> Evaluation:
        return getattr(self, self.what)(outcome)

    def true(self, outcome: Outcome) -> Evaluation:
        return Evaluation(verdict="passed", outcome_reward=True)

    def numpys(self, outcome: Outcome) -> Evaluation:
        return Evaluation(verdict="passed", outcome_reward=np.float64(1))  # type: ignore[arg-type]

    def no_verdict(self, outcome: Outcome) -> Evaluation:
        return Evaluation(verdict="pass", outcome_reward=1.0)  # type: ignore[arg-type]

    def unjudged(self, outcome: Outcome) -> Evaluation:
        return Evaluation(verdict="evaluator_error", outcome_reward=0.0, trace_rewards=[0.0])

    def half(self, outcome: Outcome) -> Evaluation:
        raise EvaluatorError("no \udcff", code="tests_crashed")

    def exits(self, outcome: Outcome) -> Evaluation:
        sys.exit(3)

    def times_out(self, outcome: Outcome) -> Evaluation:
        raise TimeoutError("of its own")

    def log(self, outcome: Outcome) -> Evaluation:
        Path(os.fsdecode(os.fsencode(outcome.logs) + b"/" + b"l" * 200 + b"\\\xff")).write_text("said")
        (outcome.logs / "link").symlink_to(__file__)
        return Evaluation(verdict="passed", outcome_reward=1.0)

    def hangs(self, outcome: Outcome) -> Evaluation:
        outcome.sandbox()
        self.over.wait()
        for ask in (lambda: outcome.sandbox().exec("true", timeout=60), outcome.another):
            try:
                ask()
            except Exception as e:
                self.late.append(e)
        self.done.set()
        return Evaluation(verdict="passed", outcome_reward=1.0)


def says(ctx: Context, what: str, **kw):
    spec = EvaluatorSpec(name=f"{__name__}:Says", config={"what": what})
    return ended(ctx, ran(ctx, what.replace("_", "-"), spec, **kw))


@pytest.mark.parametrize("what", ["true", "numpys"])
def test_a_reward_of_another_kind_is_a_number(ctx, what):
    r = says(ctx, what)
    assert (r.verdict, r.reward, type(r.reward)) == ("passed", 1.0, float)


@pytest.mark.parametrize(
    ("what", "code", "message"),
    [
        ("no_verdict", "evaluator_bug", "verdict: found 'pass', allowed: "),
        ("half", "tests_crashed", "no \\udcff"),
        ("exits", "evaluator_bug", "SystemExit: 3"),
        ("times_out", "evaluator_bug", "TimeoutError: of its own"),
    ],
)
def test_what_is_no_answer_ends_as_an_error_at_once(ctx, what, code, message):
    r = says(ctx, what)
    assert (r.verdict, r.reward, r.evaluation.error.code, r.evaluation.attempts) == ("evaluator_error", None, code, 2)
    assert message in r.evaluation.error.message


def test_an_error_is_never_a_zero(ctx):
    r = says(ctx, "unjudged")
    assert (r.verdict, r.reward) == ("evaluator_error", None)
    assert (r.evaluation.outcome_reward, r.evaluation.trace_rewards) == (None, None)
    assert ctx.store.session(r.session_id).reward is None


def test_logs_of_any_name_are_kept_and_links_are_not(ctx):
    r = says(ctx, "log")
    assert r.reward == 1.0
    assert [a.name for a in r.artifacts if "evaluation" in a.name] == ["evaluation-try1-" + "l" * 114 + "%5C%FF"]


def test_an_evaluator_that_does_not_return_keeps_no_session(ctx, monkeypatch):
    monkeypatch.setattr(judging, "_OVERTIME", 0.0)
    r = says(ctx, "hangs", evaluation_timeout_seconds=2.0)
    e = r.evaluation.error
    assert (r.verdict, r.reward, e.code, e.message) == (
        "evaluator_error",
        None,
        "evaluation_timeout",
        "the evaluator did not return",
    )
    assert ctx.store.session(r.session_id).state == "DONE" and left(ctx) == []
    Says.over.set()  # and comes back after all
    assert Says.done.wait(60)
    assert [x.code for x in Says.late] == ["exec_failed", "evaluation_timeout"] and left(ctx) == []
    postrun(ctx, r.session_id)
    assert ctx.store.session(r.session_id).verdict == "evaluator_error"
