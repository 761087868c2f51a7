"""A pipeline without workers: sessions driven through the store, results written as POSTRUN writes them."""

from __future__ import annotations

import numpy as np

from polar import arrays
from polar.codec import compress, pack
from polar.objects import ObjectStore
from polar.result import Evaluation, LedgerLine, SessionResult, Usage, result_key
from polar.session import Session
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, TaskRequest
from polar.trace import Fidelity, Segment, Trace, Trajectory


def task(task_id: str = "t1", n: int = 1, **kw) -> TaskRequest:
    agent = kw.pop("agent", AgentSpec(harness="shell", command="true"))
    return TaskRequest(agent=agent, instruction="go", task_id=task_id, num_samples=n, **kw)


def trace(session_id: str = "s") -> Trace:
    """Two prompt tokens; three sampled and one inserted response token."""
    return Trace(
        trace_id=f"{session_id}.tr0",
        prompt_ids=arrays.ids([1, 2]),
        response_ids=arrays.ids([3, 4, 9, 5]),
        loss_mask=arrays.mask([1, 1, 0, 1]),
        logprobs=arrays.floats([-0.5, -0.25, 0.0, -1.0]),
        segments=[Segment(completion_id="c1", start=0, end=2), Segment(completion_id="c2", start=3, end=4)],
        role="main",
        finish_reason="stop",
    )


def result(s: Session, t: TaskRequest, termination="finished", verdict="passed", reward: float | None = 1.0):
    fidelity = Fidelity(completions=2, chains=1, traces=1, sampled_tokens=3, trace_tokens=3, exact_tokens=3)
    return SessionResult(
        session_id=s.session_id,
        task_id=t.task_id,
        sample_index=s.index,
        attempt=s.attempt,
        termination=termination,
        verdict=verdict,
        reward=reward,
        trajectory=Trajectory(builder="prefix_merging", traces=[trace(s.session_id)], fidelity=fidelity),
        evaluation=Evaluation(verdict=verdict, outcome_reward=reward, evaluator="session_completed"),
        usage=Usage(turns=2, prompt_tokens=7, sampled_tokens=3),
        timing={"init": 0.5, "run": 2.0},
        node="n1",
        num_samples=t.num_samples,
        metadata=t.metadata,
    )


def to_run(store: SessionStore, sid: str) -> Session:
    """Admit whatever waits and bring one session to RUNNING."""
    store.node_beat("n1", ready=1000, slots=1000, backends=["local"])
    store.admit(10_000, 60, 1000)
    s = store.begin(sid, "init", "n1", "w", 60)
    assert s and store.advance(s, "READY", sandbox=b"") == "READY"
    s = store.begin(sid, "run", "n1", "w", 60)
    assert s
    return s


def finish(store: SessionStore, objects: ObjectStore, sid: str, *, write: bool = True, **kw) -> SessionResult:
    """Drive one session, wherever it is, to DONE. `write=False` commits a reference to an object that isn't there."""
    if store.session(sid).state != "POSTRUN":
        s = store.session(sid)
        store.advance(s if s.state == "RUNNING" else to_run(store, sid), "POSTRUN")
    s = store.begin(sid, "postrun", "n1", "w", 60)
    assert s
    t = store.task(s.task_id)
    r = result(s, t, **kw)
    key = result_key(t.task_id, sid, s.attempt)
    if write:
        assert objects.put_if_absent(key, compress(pack(r)))
    line = LedgerLine(session_id=sid, attempt=s.attempt, node="n1", termination=r.termination, sampled_tokens=3)
    store.commit(s, key, r.termination, r.verdict, r.reward, line, t.group)
    return r


def submit_and_finish(store: SessionStore, objects: ObjectStore, task_id: str, n: int = 1) -> list[str]:
    ids = store.submit(task(task_id, n), "local")
    for sid in ids:
        finish(store, objects, sid)
    return ids


def same(a: SessionResult, b: SessionResult) -> bool:
    one, two = a.trajectory.traces[0], b.trajectory.traces[0]
    names = ("prompt_ids", "response_ids", "loss_mask", "logprobs")
    return a.session_id == b.session_id and all(np.array_equal(getattr(one, n), getattr(two, n)) for n in names)
