"""kill -9 of who keeps warm sandboxes, at every step, then the janitor: nothing is left, and nothing that lives is touched.

As a program (`python -m tests.runtimes.test_warm_kills …`) it is the one that dies; prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial

import pytest

from polar.codec import from_json, to_json
from polar.config import Settings
from polar.sandbox import LABEL_ATTEMPT, LABEL_NAMESPACE, LABEL_NODE, LABEL_SESSION, Runtime
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.task import RuntimeSpec
from runtimes.registry import load_runtime
from runtimes.warm import WarmRuntime
from runtimes.warm_image import image_id
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import LABEL_OWNER, Pool
from runtimes.warm_shape import wish
from tests.runtimes.conftest import REPOSITORY, until
from tests.runtimes.killed_worker import child
from workers import cleanup
from workers.context import Context

NODE = "n"
# (what happens, in which function, in which thread, the how manieth)
STEPS = [
    ("call", "_make", "warm_", 1),
    ("call", "create", "warm_", 1),
    ("return", "create", "warm_", 1),
    ("return", "create", "warm_", 2),
    ("return", "_make", "warm_", 2),
    ("call", "_offered", "Main", 1),
    ("call", "adopt", "Main", 1),
    ("return", "adopt", "Main", 1),
    ("return", "_offered", "Main", 1),
    ("return", "take", "Main", 3),
    ("call", "_destroy", "warm_", 1),
    ("call", "close", "Main", 1),
    ("call", "leave", "Main", 1),
]


def settings_of(backend: str, data_dir: str, namespace: str, url: str) -> Settings:
    return Settings(
        data_dir=data_dir,
        namespace=namespace,
        broker=url,
        runtimes=[backend],
        warm_sandboxes=2,
        node_timeout_seconds=0.6,
    )


def pooled(inner: Runtime, settings: Settings) -> WarmRuntime:
    mine = {LABEL_NAMESPACE: settings.namespace, LABEL_NODE: NODE}
    ledger = Ledger(
        connect(settings.store_url), Keys(settings.namespace), NODE, inner.name, settings.node_timeout_seconds
    )
    return WarmRuntime(inner, ledger, mine, Pool(inner, ledger, mine, 2, 300, partial(image_id, inner, settings)))


def life(settings: Settings, spec: RuntimeSpec) -> None:
    """Of a worker: two cold sandboxes, two that wait, one of them used, the other removed at the end."""
    runtime = pooled(load_runtime(settings.runtimes[0], settings), settings)
    assert runtime.pool

    def create():
        labels = {LABEL_NAMESPACE: settings.namespace, LABEL_NODE: NODE, LABEL_SESSION: "s", LABEL_ATTEMPT: "s.a1"}
        return runtime.create(spec, labels=labels, proxy=None, timeout=60)

    for _ in range(2):
        create().destroy()
    until(lambda: runtime.pool.idle() == 2, 60)
    box = create()
    box.write("f", b"x")
    assert box.exec("cat f", timeout=60).output == b"x"
    box.destroy()
    wanted = wish(RuntimeSpec(open_files=77, image=spec.image, options=spec.options), None)
    for _ in range(8):
        runtime.pool.ask(wanted)  # another kind: the waiting ones go
    until(lambda: runtime.pool.idle(wanted.key) == 2, 60)
    runtime.pool.close()


def dying(run: Callable[[], None], event: str, function: str, thread: str, nth: int) -> None:
    """`run`, killed at the `nth` time that this happens."""
    count = 0

    def step(frame, what, _arg) -> None:
        nonlocal count
        code = frame.f_code
        if what == event and code.co_name == function and f"{os.sep}runtimes{os.sep}" in code.co_filename:
            count += threading.current_thread().name.startswith(thread)
            if count == nth:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(step)
    sys.setprofile(step)
    run()


def swept(settings: Settings) -> tuple[int, list[str]]:
    """How many sandboxes the janitor found, and what is left after it, at most 30 s after the death."""
    ctx = Context(settings, NODE)
    mine = {LABEL_NAMESPACE: settings.namespace, LABEL_NODE: NODE}
    inner = load_runtime(settings.runtimes[0], settings)
    found, end = len(inner.list(mine)), time.monotonic() + 30
    while True:
        cleanup.sweep(ctx)
        left = [r.handle for r in inner.list(mine)]
        if not left or time.monotonic() > end:
            # The next round finds nothing any more, and forgets.
            cleanup.sweep(ctx)
            return found, left + list(ctx.runtime(settings.runtimes[0])._ledger.records())
        time.sleep(0.1)


def main(backend: str, data_dir: str, namespace: str, url: str, spec: str, random_deaths: int) -> None:
    settings, wanted = settings_of(backend, data_dir, namespace, url), from_json(spec, RuntimeSpec)
    begun = time.monotonic()
    whole = child(lambda: life(settings, wanted))
    seconds = time.monotonic() - begun
    told: dict = {"whole": whole, "whole_left": swept(settings)[1], "killed": [], "found": 0, "left": {}}

    def at(after: float) -> None:
        signal.setitimer(signal.ITIMER_REAL, after)  # nobody handles it: the process ends at once
        life(settings, wanted)

    deaths: list[tuple[str, Callable[[], None]]] = [
        (" ".join(map(str, s)), partial(dying, lambda: life(settings, wanted), *s)) for s in STEPS
    ]
    deaths += [(f"after {i}", partial(at, seconds * (i + 0.5) / random_deaths)) for i in range(random_deaths)]
    for name, run in deaths:
        told["killed"] += [name] if os.WIFSIGNALED(child(run)) else []
        found, left = swept(settings)
        told["found"] += found
        if left:
            told["left"][name] = left
    print(json.dumps(told))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("random_deaths", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_is_left(backend, redis_url, random_deaths):
    if backend.id == "local-plain":
        pytest.skip("the same as bubblewrap's, but for how commands run")
    if backend.id == "apptainer" and random_deaths < 20:
        pytest.skip("takes minutes: with the slow ones")
    argv = [sys.executable, "-m", "tests.runtimes.test_warm_kills", backend.runtime.name, backend.settings.data_dir]
    argv += [f"k{uuid.uuid4().hex[:12]}", redis_url, to_json(backend.spec()).decode(), str(random_deaths)]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert (told["whole"], told["whole_left"]) == (0, []), done.stderr[-3000:]
    assert told["left"] == {} and told["found"] > len(STEPS)
    assert {" ".join(map(str, s)) for s in STEPS} <= set(told["killed"]), "a step was never reached"


def test_a_living_worker_s_are_left_alone(backend, store, redis_url):
    """Idle ones, and those whose attempt lives; until the attempt is dead and the worker is."""
    settings = settings_of(backend.runtime.name, backend.settings.data_dir, store.keys.ns, redis_url)
    runtime = pooled(backend.runtime, settings)
    ctx, spec = Context(settings, NODE), backend.spec()
    ctx.__dict__["store"] = store
    labels = {LABEL_NAMESPACE: store.keys.ns, LABEL_NODE: NODE, LABEL_SESSION: "t.s0", LABEL_ATTEMPT: "t.s0.a1"}
    for _ in range(8):
        runtime.pool.ask(wish(spec, None))
    until(lambda: runtime.pool.idle() == 2, 60)
    given = runtime.create(spec, labels=labels, proxy=None, timeout=60)
    store.redis.hset(store.keys.session("t.s0"), mapping={"task_id": "t", "attempt": 1, "state": "INITIALIZING"})
    if not cleanup._alive(ctx, labels):
        pytest.fail("the test's session is not what the store writes")
    until(lambda: runtime.pool.idle() == 2, 60)
    before = {r.handle for r in backend.runtime.list(runtime.pool.labels)}
    assert cleanup.sweep(ctx) == 0
    assert {r.handle for r in backend.runtime.list(runtime.pool.labels)} == before and given.ref.handle in before
    assert given.exec("echo lives", timeout=30).output == b"lives\n"
    cleanup.cleanup_attempt(ctx, "t.s0.a1")
    left = {r.handle for r in backend.runtime.list(runtime.pool.labels)}
    assert left == before - {given.ref.handle}
    assert all(LABEL_OWNER in r.labels for r in runtime.list({LABEL_NAMESPACE: store.keys.ns}))
    runtime.pool.close()
    assert backend.runtime.list(runtime.pool.labels) == []


if __name__ == "__main__":
    main(*sys.argv[1:6], int(sys.argv[6]))  # type: ignore[call-arg]
