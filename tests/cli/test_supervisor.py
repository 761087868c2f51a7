"""The supervisor with real children: restarts, failures that are told, a supervisor thread that survives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli import supervisor as module
from cli.supervisor import AWAY, FAULTS, Process, StackError, Supervisor
from tests.workers.cluster import until


@pytest.fixture
def supervisor(tmp_path, monkeypatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(module, "MAX_BACKOFF", 0.05)
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.02)
    s = Supervisor(tmp_path / "logs")
    yield s
    s.stop()


def shell(name: str, script: str, **options) -> Process:
    return Process(name, ["/bin/sh", "-c", script], **options)


def test_a_killed_child_comes_back_and_that_is_no_failure(supervisor):
    child = shell("one", "exec sleep 600")
    supervisor.start(child)
    first = child.popen.pid
    os.kill(first, signal.SIGKILL)
    until(lambda: child.started == 2 and child.popen.poll() is None)
    assert child.popen.pid != first and supervisor.failed is None
    assert not child.steady  # not yet: it has only just come back


def test_a_child_that_keeps_ending_is_told_with_its_last_words(supervisor):
    good, bad = shell("good", "exec sleep 600"), shell("bad", "echo no such thing >&2; exit 7")
    supervisor.start(good)
    supervisor.start(bad)
    assert "no such thing" in (until(lambda: supervisor.failed) or "")
    assert supervisor.failed.startswith(f"bad ended with 7, {bad.faults} times in a row: ")
    assert bad.faults >= FAULTS and good.popen.poll() is None and good.steady
    tried = bad.started
    until(lambda: bad.started > tried)  # what failed may be mended meanwhile


def test_a_child_that_recovers_is_forgiven(supervisor, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUICK_SECONDS", 0.3)
    gate = tmp_path / "gate"
    child = shell("late", f"[ -e {gate} ] || exit 1; exec sleep 600")
    supervisor.start(child)
    until(lambda: supervisor.failed)
    gate.touch()
    until(lambda: child.steady)
    assert supervisor.failed is None and child.faults == 0


def test_one_that_waits_for_a_service_is_tried_as_long_as_it_takes(supervisor):
    child = shell("waits", f"exit {AWAY}")
    supervisor.start(child)
    until(lambda: child.started > 2 * FAULTS)
    assert supervisor.failed is None and not child.steady and child.quick > FAULTS


def test_a_first_start_that_fails_is_an_error_with_the_log(supervisor):
    with pytest.raises(StackError, match=r"engine ended with 2: .*no such model"):
        supervisor.start(shell("engine", "echo no such model; exit 2", ready=lambda: False))
    with pytest.raises(StackError, match=r"mute was not ready in 0 s: .*hello"):
        log = supervisor.logs / "mute.log"
        script = "echo hello; exec sleep 600"
        supervisor.start(shell("mute", script, ready=lambda: not until(log.read_bytes), ready_timeout=0))


def test_a_program_that_cannot_be_started_neither_hangs_nor_ends_the_others(supervisor, tmp_path):
    other = shell("other", "exec sleep 600")
    supervisor.start(other)
    with pytest.raises(StackError, match=r"nothing can't be started: .*No such file"):
        supervisor.start(Process("nothing", [str(tmp_path / "nothing")]))
    assert other.popen.poll() is None
    # The same for one that ran before: the program is gone for a while (as memory or descriptors may be).
    program, away = tmp_path / "program", tmp_path / "away"
    program.symlink_to(sys.executable)
    child = Process("gone", [str(program), "-c", "import time; time.sleep(600)"])
    supervisor.start(child)
    program.rename(away)
    os.kill(child.popen.pid, signal.SIGKILL)
    until(lambda: child.faults >= FAULTS)
    assert "can't be started" in child.last and supervisor.failed
    away.rename(program)
    until(lambda: child.started == 2 and child.popen.poll() is None)
    assert other.popen.poll() is None and other.started == 1


def test_children_end_with_a_supervisor_that_is_killed(tmp_path):
    script = (
        "import sys, time; from pathlib import Path; from cli.supervisor import Process, Supervisor\n"
        "s = Supervisor(Path(sys.argv[1])); p = Process('c', ['/bin/sleep', '600']); s.start(p)\n"
        "print(p.popen.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        assert Path(f"/proc/{child}").exists()
        parent.kill()
    until(lambda: not _runs(child))


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
