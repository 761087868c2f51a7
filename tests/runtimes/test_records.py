"""Records of sandboxes on this host, and what a writer leaves who dies in the middle."""

from __future__ import annotations

import os
import signal
import threading

from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import records
from runtimes.local import LocalRuntime

PLAIN = RuntimeSpec(options={"isolation": "none"})


def in_the_middle(monkeypatch, then) -> None:
    """`then()` runs where a record is written but not yet in its place."""
    real = os.replace

    def replace(*args):
        then()
        real(*args)

    monkeypatch.setattr(records.os, "replace", replace)


def test_what_a_killed_writer_left_is_removed(tmp_path, monkeypatch):
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    pid = os.fork()
    if pid == 0:
        in_the_middle(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            runtime.create(PLAIN, labels={}, proxy=None, timeout=10)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    (left,) = runtime.root.iterdir()
    assert left.name.endswith(".new")
    assert runtime.list({}) == [] and list(runtime.root.iterdir()) == []


def test_what_a_living_writer_has_begun_is_left_alone(tmp_path, monkeypatch):
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    begun, go_on = threading.Event(), threading.Event()
    in_the_middle(monkeypatch, lambda: (begun.set(), go_on.wait(30)))
    made = []
    t = threading.Thread(target=lambda: made.append(runtime.create(PLAIN, labels={}, proxy=None, timeout=10)))
    t.start()
    assert begun.wait(30)
    assert runtime.list({}) == [] and len(list(runtime.root.iterdir())) == 1
    go_on.set()
    t.join()
    assert runtime.list({}) == [made[0].ref]
    made[0].destroy()
