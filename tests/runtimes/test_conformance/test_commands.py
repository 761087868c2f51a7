"""What every runtime promises of commands, and of their end."""

from __future__ import annotations

import os
import threading
import time

import pytest

from polar.sandbox import Runtime, Sandbox
from tests.runtimes.conftest import REPOSITORY, running, unique, until
from tests.runtimes.test_conformance.common import RUNAWAYS


def test_it_is_a_runtime(backend, box):
    assert isinstance(backend.runtime, Runtime) and isinstance(box, Sandbox)
    ok, text = backend.runtime.available()
    assert ok and text


def test_a_command_runs_in_the_working_directory(box):
    r = box.exec("pwd; echo err >&2; exit 3", timeout=30)
    assert (r.exit_code, r.timed_out, r.cancelled) == (3, False, False)
    assert r.output.decode().split() == [box.ref.workdir, "err"]
    assert r.output_bytes == len(r.output) and 0 < r.seconds < 30


def test_argv_runs_without_a_shell(box):
    assert box.exec(["printf", "%s|", "a b", "$HOME", "*"], timeout=30).output == b"a b|$HOME|*|"


def test_environment(make):
    box = make(env={"FROM_SPEC": "1", "BOTH": "spec"})
    r = box.exec(
        "echo $FROM_SPEC $BOTH $ONLY; echo $HOME; test -w $HOME && echo writable",
        env={"BOTH": "exec", "ONLY": "x y"},
        timeout=30,
    )
    assert r.output.decode().splitlines() == ["1 exec x y", box.ref.state["home"], "writable"]


def test_host_secrets_stay_outside(backend, make, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "the-host-s-secret")
    box = make()
    out = box.exec("env; cat /proc/self/environ; cat /proc/$PPID/environ", timeout=30).output
    assert b"the-host-s-secret" not in out and b"HOME=" in out
    if backend.boxed:
        data = backend.settings.data_dir
        r = box.exec(
            f"cat /etc/shadow; ls {data} {os.path.expanduser('~')}/.ssh {REPOSITORY}/pyproject.toml", timeout=30
        )
        assert r.exit_code != 0
        assert b"root:" not in r.output and b"sandboxes" not in r.output.replace(data.encode(), b"")


def test_cwd(box):
    assert box.exec("mkdir -p cwd/b", timeout=30).exit_code == 0
    for cwd in ("cwd/b", f"{box.ref.workdir}/cwd/b"):
        assert box.exec("pwd", cwd=cwd, timeout=30).output.decode().strip() == f"{box.ref.workdir}/cwd/b"
    assert box.exec("pwd", cwd="no/such", timeout=30).exit_code == 126


def test_stdin_comes_whole_and_ends(box):
    data = os.urandom(300_000)
    r = box.exec("cat | wc -c; cat | wc -c", stdin=data, timeout=30)
    assert r.output.split() == [b"300000", b"0"]
    assert box.exec("wc -c", timeout=30).output.split() == [b"0"]
    assert box.exec("exec 0<&-; echo deaf", stdin=data, timeout=30).output == b"deaf\n"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("exit 0", 0),
        ("exit 255", 255),
        ("kill -9 $$", 137),
        (["/no/such/program"], 127),
        (["no-such-program"], 127),
        (["/etc/passwd"], 126),
    ],
)
def test_exit_codes(box, command, code):
    r = box.exec(command, timeout=30)
    assert r.exit_code == code and not r.timed_out


def test_what_a_command_prints_is_no_failure_of_the_engine(box):
    r = box.exec("printf 'OCI runtime exec failed: unable to start'; exit 126", timeout=30)
    assert r.exit_code == 126


def test_output_is_bounded_and_logged(box, tmp_path):
    log = tmp_path / "logs" / "out.log"
    r = box.exec(
        "i=0; while [ $i -lt 30000 ]; do echo line $i; i=$((i+1)); done; echo end >&2",
        timeout=60,
        log=log,
        output_limit=1000,
        log_limit=50_000,
    )
    assert r.exit_code == 0 and len(r.output) == 1000 and r.output.endswith(b"line 29999\nend\n")
    assert log.stat().st_size == 50_000 and log.read_bytes().startswith(b"line 0\nline 1\n")
    assert r.output_bytes == sum(len(f"line {i}\n") for i in range(30_000)) + 4


def test_output_arrives_while_the_command_runs(box, tmp_path):
    log = tmp_path / "log"
    seen = []

    def cancelled() -> bool:
        seen.append(log.read_bytes())
        return b"begun\n" in seen[-1]

    assert box.exec("echo begun; sleep 60", timeout=60, log=log, cancelled=cancelled).cancelled


# -- their end


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_the_whole_tree_is_killed(make, how):
    box, word = make(), unique()
    started = time.monotonic()
    if how == "deadline":
        r = box.exec(RUNAWAYS.format(word), timeout=2)
        assert r.timed_out and not r.cancelled
    else:
        r = box.exec(RUNAWAYS.format(word), timeout=60, cancelled=lambda: running(word) >= 5)
        assert r.cancelled and not r.timed_out
    assert r.exit_code is None and time.monotonic() - started < 15
    assert running(word) == 0
    assert box.exec("echo alive", timeout=30).output == b"alive\n"


@pytest.mark.parametrize("first", ["older", "younger"])
def test_one_command_s_end_is_not_another_s(make, first):
    box, word, brief = make(), unique(), unique()
    over, results = threading.Event(), {}

    def run(name: str, **how) -> threading.Thread:
        t = threading.Thread(target=lambda: results.update({name: box.exec(how.pop("command"), **how)}))
        t.start()
        return t

    long = {"command": f"sleep {word} & wait", "timeout": 60, "cancelled": over.is_set}
    if first == "older":
        t = run("long", **long)
        until(lambda: running(word))
        assert box.exec(f"sleep {brief}", timeout=0.5).timed_out
    else:
        ender = threading.Event()
        other = run("brief", command=f"sleep {brief}", timeout=60, cancelled=ender.is_set)
        until(lambda: running(brief))
        t = run("long", **long)
        until(lambda: running(word))
        ender.set()
        other.join()
        assert results["brief"].cancelled
    assert (running(word), running(brief)) == (1, 0)
    over.set()
    t.join()
    assert results["long"].cancelled and running(word) == 0


def test_what_an_earlier_command_left_running(backend, make):
    """It goes on (inside bubblewrap it ends with its command), through another's deadline, until the sandbox is stopped."""
    box, word = make(), unique()
    assert (
        box.exec(
            f"env -i sleep {word} </dev/null >/dev/null 2>&1 & setsid sleep {word} </dev/null >/dev/null 2>&1 &",
            timeout=30,
        ).exit_code
        == 0
    )
    left = 0 if backend.id == "local-bwrap" else 2
    until(lambda: running(word) == left)
    assert box.exec("sleep 100", timeout=0.5).timed_out
    assert running(word) == left


def test_stop_kills_everything_and_keeps_the_files(backend, make, tmp_path):
    box, word = make(), unique()
    t = threading.Thread(target=lambda: box.exec("echo kept > kept;" + RUNAWAYS.format(word), timeout=60))
    t.start()
    until(lambda: running(word) >= 5)
    backend.runtime.attach(box.ref).stop()
    assert running(word) == 0
    t.join(20)
    assert not t.is_alive()
    box.stop()
    assert not box.download("kept", tmp_path / "kept", limit=100)
    assert (tmp_path / "kept").read_bytes() == b"kept\n"
    assert box.exec("cat kept", timeout=30).output == b"kept\n"


def test_cancelled_that_raises_leaves_nothing(make):
    box, word = make(), unique()

    def cancelled() -> bool:
        if running(word) >= 5:
            raise RuntimeError("the caller's own")
        return False

    with pytest.raises(RuntimeError):
        box.exec(RUNAWAYS.format(word), timeout=60, cancelled=cancelled)
    assert running(word) == 0
