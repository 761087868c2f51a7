"""The small parts on their own: output, frames, options, processes, registry."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.config import Settings
from polar.errors import InfraError, InvalidTask
from polar.task import RuntimeSpec, Volume
from runtimes import bwrap, procs
from runtimes.bounds import Ended, while_ended
from runtimes.docker_exec import Frames
from runtimes.local import LocalRuntime
from runtimes.local_box import mount_points
from runtimes.output import Output
from runtimes.registry import load_runtime
from runtimes.watch import Watch

CHUNKS = st.lists(st.binary(max_size=50), max_size=20)


@given(CHUNKS, st.integers(0, 60), st.integers(0, 60))
def test_output_keeps_the_last_and_logs_the_first(tmp_path_factory, chunks, limit, log_limit):
    log = tmp_path_factory.mktemp("o") / "log"
    out = Output(limit, log, log_limit)
    for c in chunks:
        out.feed(c)
    out.close()
    whole = b"".join(chunks)
    assert out.total == len(whole)
    assert out.tail == (whole[-limit:] if limit else b"")
    assert log.read_bytes() == whole[:log_limit]


@given(CHUNKS, st.lists(st.integers(1, 30), min_size=1, max_size=10))
def test_frames_however_they_are_cut(chunks, cuts):
    stream = b"".join(bytes([1 + i % 2, 0, 0, 0]) + len(c).to_bytes(4, "big") + c for i, c in enumerate(chunks))
    out = Output(10_000, None, 0)
    frames, at, i = Frames(out), 0, 0
    while at < len(stream):
        size = cuts[i % len(cuts)]
        frames.feed(stream[at : at + size])
        at, i = at + size, i + 1
    assert out.tail == b"".join(chunks[::2])
    assert frames.engine_said == b"".join(chunks[1::2])[:4096]  # the second stream is the engine's


def test_watch():
    w = Watch(0.0, None)
    assert w.expired() and w.timed_out and not w.was_cancelled and w.wait() == 0
    answers = iter([False, True])
    w = Watch(60, lambda: next(answers))
    assert not w.expired()
    w._next = 0
    assert w.expired() and w.was_cancelled and not w.timed_out
    assert w.expired()  # and asks no more


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"isolation": "vm"}}, "runtime.options"),
        ({"options": {"rlimits": {"x": 1}}}, "runtime.options"),
        ({"options": {"rlimits": {"open_files": 0}}}, "runtime.options"),
        ({"workdir": "/usr/src"}, "runtime.workdir"),
        ({"workdir": "/"}, "runtime.workdir"),
        ({"workdir": "/a/../etc"}, "runtime.workdir"),
        ({"volumes": [Volume(source="/srv/x", target="/usr/x")]}, r"runtime.volumes\[0\].target"),
        ({"volumes": [Volume(source="/srv/x", target="/work/a/b")]}, r"runtime.volumes\[0\].target"),
        ({"volumes": [Volume(source="/srv/x", target="/")]}, r"runtime.volumes\[0\].target"),
        ({"volumes": [Volume(source="/srv/x", target="/home")]}, r"runtime.volumes\[0\].target"),
    ],
)
def test_what_local_refuses(tmp_path, fields, message):
    with pytest.raises(InvalidTask, match=message):
        LocalRuntime(Settings(data_dir=str(tmp_path))).check(RuntimeSpec(**fields))


def test_no_mount_lies_in_another_s_reach():
    assert mount_points(RuntimeSpec()) == ("/home/agent", "/tmp", "/work")
    assert mount_points(RuntimeSpec(workdir="/home/agent/project")) == ("/home/agent", "/tmp")
    assert mount_points(RuntimeSpec(volumes=[Volume(source="/srv/x", target="/tmp/x")]))
    for folder in bwrap.python():
        with pytest.raises(InvalidTask, match=r"runtime\.workdir"):
            mount_points(RuntimeSpec(workdir=os.path.dirname(folder)))


def test_registry(tmp_path):
    settings = Settings(data_dir=str(tmp_path))
    a = load_runtime("local", settings)
    assert a is load_runtime("local", settings) and a.name == "local"
    assert a is not load_runtime("local", Settings(data_dir=str(tmp_path / "other")))
    assert load_runtime("runtimes.local:LocalRuntime", settings).name == "local"
    with pytest.raises(InvalidTask, match=r"runtime\.backend.*'podman'.*allowed: .*docker"):
        load_runtime("podman", settings)


def test_processes_are_read_whatever_their_name(tmp_path):
    odd = tmp_path / ") S 1 (x"
    odd.symlink_to(sys.executable)
    p = subprocess.Popen([str(odd), "-c", "import time;time.sleep(60)"], start_new_session=True)
    try:
        end = time.monotonic() + 10
        while b") S" not in Path(f"/proc/{p.pid}/stat").read_bytes() and time.monotonic() < end:
            time.sleep(0.01)
        seen = procs.read(p.pid)
        assert seen and (seen.ppid, seen.sid, seen.pgid) == (os.getpid(), p.pid, p.pid)
        assert 0 <= procs.ticks_now() - seen.start < 20 * procs.TICKS
    finally:
        assert procs.kill_all(lambda all: {p.pid} & set(all))
        assert p.wait(5) == -9
    assert procs.read(p.pid) is None


def test_killing_spares_this_process_and_init():
    assert procs.kill_all(lambda all: {1, os.getpid()}, timeout=0.5)


def test_families():
    def proc(pid, ppid, pgid, sid):
        return procs.Proc(pid, ppid, pgid, sid, 0, "S")

    all = {
        p.pid: p
        for p in [
            proc(10, 1, 10, 10),
            proc(11, 10, 10, 10),
            proc(12, 11, 12, 12),
            proc(13, 1, 12, 12),
            proc(20, 1, 20, 20),
        ]
    }
    assert procs.with_family({10}, all) == {10, 11, 12, 13}
    assert procs.with_family({20}, all) == {20}
    assert procs.with_family(set(), all) == set()


def test_a_sandbox_that_ended_is_tried_again_and_nothing_else():
    tried = []

    def run(*failures):
        left = list(failures)
        tried.clear()

        def once():
            tried.append(1)
            if left:
                raise left.pop(0)
            return "made"

        return while_ended(once)

    ended = Ended("it ended", code="exec_failed")
    assert run(ended, ended) == "made" and len(tried) == 3
    with pytest.raises(Ended):
        run(ended, ended, ended)
    assert len(tried) == 3
    with pytest.raises(InfraError):
        run(InfraError("another", code="exec_failed"))
    assert len(tried) == 1
