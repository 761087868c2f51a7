"""The pool: who gets which sandbox, what is done about dead, old and superfluous ones, and about an engine that fails."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import docker
import pytest

from polar.config import Settings
from polar.errors import InfraError
from polar.sandbox import LABEL_ATTEMPT, LABEL_NAMESPACE, LABEL_NODE, Sandbox
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.task import Exec, RuntimeSpec
from runtimes import warm_pool
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime
from runtimes.warm import WarmRuntime, WarmRuntimes
from runtimes.warm_image import image_id
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import Pool
from runtimes.warm_shape import wish
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image, until

SPEC = RuntimeSpec(options={"isolation": "none"})
MINE = {LABEL_NAMESPACE: f"w{uuid.uuid4().hex[:12]}", LABEL_NODE: "n"}
TASK = {**MINE, LABEL_ATTEMPT: "a"}


class Seen(LocalRuntime):
    """A real back-end that keeps what it was asked for, and fails on demand."""

    def __init__(self, settings: Settings):
        super().__init__(settings)
        self.asked: list[tuple[RuntimeSpec, dict[str, str]]] = []
        self.error: InfraError | None = None
        self.gate = threading.Event()
        self.gate.set()

    def create(self, spec, *, labels, proxy, timeout):
        self.asked.append((spec, labels))
        if self.error and warm_pool.LABEL_OWNER in labels:
            raise self.error
        if warm_pool.LABEL_OWNER not in labels:
            self.gate.wait(30)
        return super().create(spec, labels=labels, proxy=proxy, timeout=timeout)

    def made_in_advance(self) -> int:
        return sum(warm_pool.LABEL_OWNER in labels for _, labels in self.asked)


@pytest.fixture
def settings(tmp_path) -> Settings:
    return Settings(data_dir=str(tmp_path / "data"))


@pytest.fixture
def keys() -> Keys:
    return Keys(f"t{uuid.uuid4().hex}")


@pytest.fixture
def pools(redis_url, keys) -> Iterator[Callable[..., WarmRuntime]]:
    made: list[Pool] = []
    with connect(redis_url) as client:

        def make(inner, settings, size=2, seconds=300.0, signature=15.0) -> WarmRuntime:
            ledger = Ledger(client, keys, "n", inner.name, signature)
            made.append(Pool(inner, ledger, MINE, size, seconds, lambda spec: image_id(inner, settings, spec)))
            return WarmRuntime(inner, ledger, MINE, made[-1])

        yield make
        for pool in made:
            pool.close()


@pytest.fixture
def inner(settings) -> Seen:
    return Seen(settings)


@pytest.fixture
def runtime(pools, inner, settings) -> WarmRuntime:
    return pools(inner, settings)


@pytest.fixture
def engine(settings) -> Iterator[DockerRuntime]:
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    yield (made := DockerRuntime(settings))
    for ref in made.list(MINE):
        made.attach(ref).destroy()


def create(runtime: WarmRuntime, spec: RuntimeSpec = SPEC, labels=TASK) -> Sandbox:
    return runtime.create(spec, labels=labels, proxy=None, timeout=60)


def filled(runtime: WarmRuntime, n: int = 2, spec: RuntimeSpec = SPEC) -> set[str]:
    """Handles of the idle ones, once there are `n`."""
    wanted = wish(spec, None)
    for _ in range(8):
        runtime.pool.ask(wanted)
    until(lambda: runtime.pool.idle(wanted.key) == n, 60)
    return {r.handle for r in runtime._inner.list(runtime.pool.labels)}


def test_it_is_off_unless_it_is_asked_for(settings, redis_url):
    with connect(redis_url) as client:
        assert WarmRuntimes(settings, client, "n").over("docker", DockerRuntime(settings)).pool is None
        on = WarmRuntimes(Settings(data_dir=settings.data_dir, warm_sandboxes=1), client, "n")
        assert on.over("docker", DockerRuntime(settings)).pool
        assert on.over("local", LocalRuntime(settings)).pool is None, "made faster than it is checked"
        on.close()


def test_one_is_handed_out_under_the_task_s_labels_and_made_good(runtime, inner):
    before = filled(runtime)
    box = create(runtime)
    assert box.ref.handle in before and box.ref.labels == TASK
    assert [r.handle for r in runtime.list({LABEL_ATTEMPT: "a"})] == [box.ref.handle]
    assert runtime.list(TASK)[0].labels == TASK
    until(lambda: runtime.pool.idle() == 2, 30)
    found = {r.handle for r in runtime.list(MINE)}
    assert len(found) == 3 and box.ref.handle in found
    assert box.ref.handle not in {r.handle for r in runtime.list(runtime.pool.labels)}
    box.destroy()
    assert runtime.list({LABEL_ATTEMPT: "a"}) == []


def test_the_first_of_its_kind_is_cold_and_alone(runtime, inner):
    box = create(runtime)
    assert [labels for _, labels in inner.asked] == [TASK]
    runtime.pool._tend(time.monotonic())
    assert runtime.pool.idle() == 0 and inner.made_in_advance() == 0
    box.destroy()


def test_nothing_of_a_task_is_in_it(runtime, inner):
    spec = RuntimeSpec(options=SPEC.options, prepare=[Exec(command="touch was-here")], evaluation_prepare=[])
    filled(runtime, spec=spec)
    assert all(s.prepare == [] and s.evaluation_prepare is None and s.env == {} for s, _ in inner.asked)
    box = create(runtime, spec)
    assert box.exec("ls -A", timeout=30).output == b""
    box.destroy()
    own = RuntimeSpec(options=SPEC.options, env={"A": "1"})
    for _ in range(3):
        box = create(runtime, own)
        assert box.exec("echo $A", timeout=30).output == b"1\n"
        box.destroy()
    assert all(not s.env for s, labels in inner.asked if labels != TASK)


def test_another_spec_gets_a_cold_one(runtime):
    before = filled(runtime)
    other = RuntimeSpec(options=SPEC.options, open_files=99)
    box = create(runtime, other)
    assert box.ref.handle not in before and box.exec("ulimit -n", timeout=30).output == b"99\n"
    box.destroy()


def test_a_dead_one_is_replaced_and_nobody_notices(runtime, inner):
    before = filled(runtime)
    dead = runtime.pool._idle[wish(SPEC, None).key][0].sandbox.ref
    inner.attach(dead).destroy()
    box = create(runtime)
    assert box.ref.handle in before - {dead.handle}
    box.destroy()
    filled(runtime)
    for ref in inner.list(runtime.pool.labels):
        inner.attach(ref).destroy()
    box = create(runtime)  # none is left alive: a cold one, or one made meanwhile
    assert box.exec("echo works", timeout=30).output == b"works\n"
    box.destroy()


@pytest.mark.docker
@pytest.mark.parametrize("how", ["kill", "remove"])
def test_a_killed_container(pools, engine, settings, how):
    runtime, spec = pools(engine, settings), RuntimeSpec(image=IMAGE)
    filled(runtime, spec=spec)
    with docker.APIClient() as api:
        for ref in engine.list(runtime.pool.labels):
            if how == "kill":
                api.kill(ref.handle)
            else:
                api.remove_container(ref.handle, force=True)
        box = create(runtime, spec)
        assert api.inspect_container(box.ref.handle)["State"]["Running"]
        assert box.exec("ls -A; echo works", timeout=30).output == b"works\n"
        box.destroy()
    runtime.pool.close()
    assert engine.list(MINE) == []


@pytest.mark.docker
def test_an_image_of_another_content_under_the_same_name(pools, engine, settings):
    name = f"polar-warm-test-{uuid.uuid4().hex[:8]}"
    with docker.APIClient() as api:
        api.tag(IMAGE, name, "t")
        try:
            runtime, spec = pools(engine, settings), RuntimeSpec(image=f"{name}:t", workdir="/work")
            before = filled(runtime, spec=spec)
            made = api.create_container(IMAGE, ["true"])["Id"]
            with_more = api.commit(made, repository=name, tag="t", changes='LABEL "is"="new"')["Id"]
            api.remove_container(made)
            box = create(runtime, spec)
            assert api.inspect_container(box.ref.handle)["Image"] == with_more
            assert box.ref.handle not in before
            box.destroy()
            runtime.pool.close()
        finally:
            api.remove_image(f"{name}:t", force=True)


def test_each_is_handed_out_once(pools, inner, settings):
    """Two workers of one node, each with many that ask at once."""
    workers = [pools(inner, settings, size=4), pools(inner, settings, size=4)]
    ready = set().union(*(filled(w, 4) for w in workers))
    assert len(ready) == 8
    with ThreadPoolExecutor(16) as threads:
        boxes = list(threads.map(lambda i: create(workers[i % 2], labels={**TASK, LABEL_ATTEMPT: f"a{i}"}), range(16)))
    assert len({b.ref.handle for b in boxes}) == 16 and ready & {b.ref.handle for b in boxes}
    for i, box in enumerate(boxes):
        assert [r.handle for r in workers[1 - i % 2].list({LABEL_ATTEMPT: f"a{i}"})] == [box.ref.handle]
        box.destroy()


def test_one_wins_between_hand_out_and_removal(runtime):
    ledger = runtime._ledger
    for i in range(20):
        with ThreadPoolExecutor(8) as threads:
            act = lambda n, i=i: ("adopt" if n % 2 else "condemn", ledger_call(ledger, n, f"h{i}"))  # noqa: E731
            done = list(threads.map(act, range(8)))
        adopted = [ok for what, ok in done if what == "adopt"].count(True)
        condemned = [ok for what, ok in done if what == "condemn"]
        assert (adopted, set(condemned)) in ((1, {False}), (0, {True}))


def ledger_call(ledger: Ledger, n: int, handle: str) -> bool:
    return ledger.adopt(handle, {"a": str(n)}) if n % 2 else ledger.condemn(handle)


def test_a_condemned_one_is_not_handed_out(runtime):
    before = filled(runtime)
    assert all(runtime.condemn(handle) for handle in before)
    box = create(runtime)
    assert box.ref.handle not in before
    box.destroy()


def test_redis_is_away(pools, inner, settings, tmp_path):
    runtime = pools(inner, settings)
    before = filled(runtime)
    alive, runtime._ledger._redis = runtime._ledger._redis, connect(f"unix://{tmp_path}/nobody")
    box = create(runtime)
    assert box.ref.handle not in before
    box.destroy()
    runtime._ledger._redis = alive


def test_nothing_is_made_in_advance_while_somebody_waits(runtime, inner):
    inner.gate.clear()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(create, runtime) for _ in range(3)]
        until(lambda: len(inner.asked) == 3)
        runtime.pool._tend(time.monotonic())
        assert (inner.made_in_advance(), runtime.pool._making.total()) == (0, 0)
        inner.gate.set()
        for w in waiting:
            w.result().destroy()
    until(lambda: runtime.pool.idle() == 2, 30)


def test_a_failing_engine_is_left_alone_for_longer_each_time(runtime, inner):
    inner.error = InfraError("the engine is down", code="runtime_create_failed")
    begun = time.monotonic()
    for _ in range(8):
        runtime.pool.ask(wish(SPEC, None))

    def busy_callers() -> bool:
        runtime.pool._wake.set()
        return runtime.pool._failures >= 3

    until(busy_callers, 60)
    # Two at a time may fail at once; then pauses of 1, 2, 4 … s lie between.
    rounds = (inner.made_in_advance() + 1) // 2
    assert time.monotonic() - begun >= 2 ** (rounds - 1) - 1
    inner.error = None
    until(lambda: runtime.pool.idle() == 2, 90)
    assert runtime.pool._failures == 0


def test_what_can_t_work_is_not_tried_again(runtime, inner):
    inner.error = InfraError("no such image", code="image_missing", retryable=False)
    for _ in range(8):
        runtime.pool.ask(wish(SPEC, None))
    until(lambda: runtime.pool._failures and not runtime.pool._asked)
    runtime.pool._not_before = 0.0
    tried = inner.made_in_advance()
    until(lambda: not runtime.pool._making)
    runtime.pool._tend(time.monotonic())
    assert inner.made_in_advance() == tried <= warm_pool.AT_ONCE


def test_old_ones_and_those_nobody_asks_for_go(runtime, inner):
    filled(runtime)
    runtime.pool._seconds = 0.0
    until(lambda: runtime.pool.idle() == 0 and not inner.list({}), 30)


def test_another_kind_takes_their_places(runtime, inner):
    before = filled(runtime)
    other = RuntimeSpec(options=SPEC.options, open_files=99)
    filled(runtime, spec=other)
    until(lambda: not before & {r.handle for r in inner.list({})}, 30)
    assert runtime.pool.idle() == 2


def test_strays_under_the_pool_s_label_are_removed(runtime, inner):
    before = filled(runtime)
    stray = LocalRuntime.create(inner, SPEC, labels=runtime.pool.labels, proxy=None, timeout=60)
    given = create(runtime)
    runtime.pool._audit()
    assert stray.ref.handle in {r.handle for r in inner.list({})}, "it might be in the making"
    runtime.pool._audit()
    left = {r.handle for r in inner.list({})}
    assert stray.ref.handle not in left and given.ref.handle in left and len(left & before) == 2
    given.destroy()


def test_records_of_what_is_gone_are_forgotten(runtime):
    filled(runtime)
    gone, kept = create(runtime), create(runtime)
    gone.destroy()
    assert gone.ref.handle in runtime._ledger.records()
    seen = {r.handle for r in runtime.list(MINE)}
    runtime.tidy(seen, lambda labels: True)
    assert gone.ref.handle in runtime._ledger.records(), "its attempt lives; it may lie where this worker can't see it"
    runtime.tidy(seen, lambda labels: False)
    assert gone.ref.handle not in runtime._ledger.records()
    assert [r.handle for r in runtime.list({LABEL_ATTEMPT: "a"})] == [kept.ref.handle]
    kept.destroy()


def test_close_removes_what_is_idle_and_keeps_what_was_given(runtime, inner):
    filled(runtime)
    box = create(runtime)
    runtime.pool.close()
    assert [r.handle for r in inner.list({})] == [box.ref.handle]
    assert not runtime.lives(runtime.pool.owner)
    again = create(runtime)
    assert again.ref.labels == TASK, "a closed pool leaves it to the back-end"
    for b in (box, again):
        b.destroy()
