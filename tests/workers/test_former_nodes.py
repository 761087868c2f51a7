"""A machine whose worker comes back under another node name: what the former name left goes, and nothing that lives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polar.config import Settings
from polar.sandbox import LABEL_ATTEMPT, LABEL_NAMESPACE, LABEL_NODE, LABEL_PURPOSE, LABEL_SESSION
from polar.task import RuntimeSpec
from runtimes.registry import load_runtime
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import LABEL_OWNER, PURPOSE
from tests.workers.cluster import noop
from workers.app import queue_for
from workers.cleanup import GONE_SECONDS, cleanup_attempt, sweep
from workers.context import Context
from workers.init import init
from workers.reaper import depth, reap_once

SPEC = RuntimeSpec(backend="local", options={"isolation": "none"})


@pytest.fixture
def settings(tmp_path, redis_url, store) -> Settings:
    return Settings(namespace="t", data_dir=str(tmp_path), broker=redis_url, runtimes=["local"], lease_seconds=60.0)


@pytest.fixture
def old(settings) -> Iterator[Context]:
    """The worker before; the node gave a sign of life."""
    ctx = Context(settings, "old")
    beat(ctx, "old")
    yield ctx
    ctx.leases.close()


@pytest.fixture
def new(settings, old) -> Context:
    return Context(settings, "new")


def beat(ctx: Context, node: str, ago: float = 0.0) -> None:
    ctx.store.node_beat(node, ready=8, slots=8, backends=["local"])
    ctx.store.redis.hincrbyfloat(ctx.keys.node(node), "beat", -ago)


def ready(ctx: Context, name: str) -> str:
    """A session whose sandbox waits on the node of `ctx`."""
    ctx.store.submit(noop(name), "local")
    assert ctx.store.admit(100, 60)
    init(ctx, f"{name}.s0")
    assert ctx.store.session(f"{name}.s0").state == "READY"
    return f"{name}.s0"


def made(ctx: Context, node: str, **labels: str) -> str:
    """A sandbox that carries these labels."""
    labels = {LABEL_NAMESPACE: "t", LABEL_NODE: node, **{f"polar.{k}": v for k, v in labels.items()}}
    return load_runtime("local", ctx.settings).create(SPEC, labels=labels, proxy=None, timeout=60).ref.handle


def here(ctx: Context) -> set[str]:
    return {ref.handle for ref in load_runtime("local", ctx.settings).list({})}


def members(ctx: Context) -> set[str]:
    return {m.decode() for m in ctx.store.redis.zrange(ctx.keys.cleanup, 0, -1)}


def test_what_a_silent_node_left_here_is_swept_and_forgotten(old, new):
    sid = ready(old, "one")
    assert sweep(new) == 0  # the node lives, and the session
    beat(old, "old", ago=60)
    assert sweep(new) == 0 and len(here(new)) == 1  # the session still counts on its sandbox
    reap_once(new)
    assert ready_again(new, sid) and members(new) == {f"old|{sid}.a1"}
    assert sweep(new) == 1 and here(new) == set() and members(new) == set()


def ready_again(ctx: Context, sid: str) -> bool:
    s = ctx.store.session(sid)
    return s.state == "PENDING" and s.attempt == 1


def test_only_what_is_this_deployment_s_and_has_no_living_node(old, new):
    """A second deployment with the same namespace has nodes that this store doesn't know."""
    beat(new, "neighbour")
    kept = {
        made(new, "neighbour", session="no.s0", attempt="no.s0.a1"),
        made(new, "of-another-deployment", session="no.s0", attempt="no.s0.a1"),
    }
    beat(old, "old", ago=60)
    made(new, "old", session="no.s0", attempt="no.s0.a1")
    assert sweep(new) == 1 and here(new) == kept
    beat(new, "neighbour", ago=60)
    assert sweep(new) == 1 and len(here(new)) == 1


def test_warm_ones_go_by_the_ledger_of_their_own_node(old, new):
    sid = ready(old, "given")
    attempt = {LABEL_SESSION: sid, LABEL_ATTEMPT: f"{sid}.a1"}
    ledger = Ledger(old.store.redis, old.keys, "old", "local", 60)
    ledger.sign("alive")
    given, idle, dead = (
        made(old, "old", **{LABEL_PURPOSE[6:]: PURPOSE, LABEL_OWNER[6:]: owner}) for owner in ("dead", "alive", "dead")
    )
    labels = {LABEL_NAMESPACE: "t", LABEL_NODE: "old", LABEL_PURPOSE: "agent", **attempt}
    assert ledger.adopt(given, labels)
    beat(old, "old", ago=60)
    assert sweep(new) == 1 and dead not in here(new) and {given, idle} <= here(new)
    # Its worker is dead, and so is the attempt that has the other.
    ledger.leave("alive")
    reap_once(new)
    assert sweep(new) == 3 and here(new) == set()
    assert not Ledger(new.store.redis, new.keys, "new", "local", 60).records()
    beat(old, "old", ago=GONE_SECONDS + 60)
    sweep(new)
    assert not ledger.records()


def test_clean_up_goes_on_beside_many_nodes_that_are_gone(old, new):
    stale = {f"{node}|gone.s{n}.a1": n for node in ("old", "never-seen") for n in range(800)}
    new.store.redis.zadd(new.keys.cleanup, stale)
    beat(old, "old", ago=GONE_SECONDS + 60)
    beat(new, "new")
    beat(new, "silent", ago=60)
    new.store.redis.zadd(new.keys.cleanup, {"new|late.s0.a1": 10_000, "silent|late.s1.a1": 10_001})
    reap_once(new)
    # One that is only silent may come back under its name.
    assert members(new) == {"new|late.s0.a1", "silent|late.s1.a1"}
    assert depth(new, queue_for("cleanup", "new")) == 1 and depth(new, queue_for("cleanup", "old")) == 0
    cleanup_attempt(new, "late.s0.a1")
    assert members(new) == {"silent|late.s1.a1"}


def test_many_of_one_node_keep_no_other_s(new):
    beat(new, "new")
    beat(new, "slow")
    new.store.redis.zadd(new.keys.cleanup, {f"slow|s{n}.a1": n for n in range(1200)} | {"new|late.s0.a1": 10_000})
    reap_once(new)
    assert depth(new, queue_for("cleanup", "new")) == 1 and depth(new, queue_for("cleanup", "slow")) == 500
