"""The copy-on-write root of `local` sandboxes: seen by all their commands, never on the host, gone with them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from polar import changes
from polar.codec import to_json
from polar.config import Settings
from polar.errors import InfraError, NotFound
from polar.task import RuntimeSpec, Volume
from runtimes import bwrap, holder, local_cow, procs
from runtimes.local import LocalRuntime
from tests.runtimes.conftest import REPOSITORY, running, unique, until
from tests.runtimes.cow import COW, FOUND, ONE, SEE, SEEN, SPEC, WRITE, cow_make, cow_runtime, holders, needs_bwrap, ok  # noqa: F401
from tests.runtimes.ordinary import ordinary_python

pytestmark = needs_bwrap


def test_writes_are_seen_later_and_nowhere_else(make):
    box, other = make(), make()
    assert box.ref.state["root"] == "overlay"
    ok(box, WRITE)
    assert ok(box, SEE) == SEEN
    assert b"polar-" not in ok(other, "ls / /usr/bin /etc /opt /var /usr/local/lib; ls /usr/bin/env")
    for path in ("/usr/bin/polar-x", "/etc/polar-x", "/opt/polar-x", "/var/polar-x", "/polar-x", "/usr/bin/polar-tail"):
        assert not os.path.lexists(path)
    assert os.path.exists("/usr/bin/env") and "more" not in Path("/etc/hostname").read_text()


def test_commands_at_the_same_time_see_each_other_s(make):
    box, results = make(), []
    waiting = "touch /usr/lib/polar-ready; until [ -e /usr/lib/polar-go ]; do sleep 0.05; done; cat /usr/lib/polar-go"
    t = threading.Thread(target=lambda: results.append(box.exec(waiting, timeout=60)))
    t.start()
    until(lambda: box.exec("test -e /usr/lib/polar-ready", timeout=30).exit_code == 0, 30)
    assert len(holders(box._folder)) == 1
    box.write("/usr/lib/polar-go", b"uploaded")
    t.join()
    assert results[0].output == b"uploaded"


def test_many_begin_at_once(runtime, make):
    """One holder, whoever comes first after the last one ended."""
    box = make()
    ok(box, WRITE)
    (pid,) = holders(box._folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: holders(box._folder) == [])
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(runtime.attach(box.ref).exec(SEE, timeout=60))) for _ in range(6)
    ]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert {b" ".join(r.output.split()) for r in results} == {SEEN} and len(results) == 6
    assert len(holders(box._folder)) == 1


def test_files_stay(runtime, make, tmp_path):
    """After `stop`, the agent's kill of all it can reach, and the end of whatever held the mounts."""
    box = make()
    ok(box, WRITE)
    box.exec("kill -9 -1", timeout=30)
    assert ok(box, SEE) == SEEN
    box.stop()
    assert ok(box, SEE) == SEEN
    (pid,) = holders(box._folder)
    os.kill(pid, signal.SIGKILL)
    box.stop()
    assert not box.download("/usr/bin/polar-x", tmp_path / "x", limit=100)
    assert (tmp_path / "x").read_text() == "new\n" and ok(runtime.attach(box.ref), SEE) == SEEN


def test_what_used_the_old_mounts_ends_before_there_are_new_ones(make):
    """One upper folder in two mounts at once is undefined."""
    box, word, results = make(), unique(), []
    t = threading.Thread(target=lambda: results.append(box.exec(f"sleep {word}", timeout=60)))
    t.start()
    until(lambda: running(word))
    (pid,) = holders(box._folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: holders(box._folder) == [])
    ok(box, "true")
    assert running(word) == 0
    t.join()


# -- hostile

FORGE = """
import os,stat
for at in ("/usr/bin","/etc","/work","/usr/share"):
    for name in ("user.overlay.opaque","user.overlay.whiteout","user.overlay.redirect","trusted.overlay.opaque"):
        try: os.setxattr(at,name,b"y")
        except OSError: pass
    for major in (0,1):
        try: os.mknod(at+"/forged%d"%major,stat.S_IFCHR|0o666,os.makedev(major,major*3))
        except OSError: pass
os.makedirs("/work/repo/sub"); open("/work/repo/kept","w").write("kept")
try: os.mknod("/work/repo/kept2",stat.S_IFCHR|0o666,0)
except OSError: pass
os.rename("/work/repo/sub","/work/repo/kept3")
"""


def test_forged_whiteouts_mean_nothing(make, tmp_path):
    """Even where the system call filter is left out."""
    box = make(options={"seccomp": False})
    before = set(os.listdir("/usr/bin"))
    ok(box, ["python3", "-c", FORGE])
    assert set(ok(box, "ls -A /usr/bin").decode().split()) >= before
    box.stop()
    box.changes(tmp_path / "c.tar", under="/", baseline=box.baseline("/"), limit=1 << 20)
    gone = changes.removed(tmp_path / "c.tar")
    assert gone == [] and "work/repo/kept" in changes.paths(tmp_path / "c.tar")
    (pid,) = holders(box._folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: holders(box._folder) == [])
    assert set(ok(box, "ls -A /usr/bin").decode().split()) >= before


def test_no_link_leads_out(make, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "f").write_text("the host's")
    box = make()
    ok(
        box,
        f"rm -rf /opt/* /usr/local/lib; ln -s {outside} /usr/local/lib; ln -s {outside}/f /etc/door; ln -s / /opt/up",
    )
    paths = ("/usr/local/lib/f", "/etc/door", f"/opt/up/../../..{outside}/f")
    for path in paths:
        with pytest.raises(NotFound):
            box.download(path, tmp_path / "x", limit=100)
    for path in paths:
        try:
            box.write(path, b"overwritten")
        except InfraError as e:
            assert e.code == "upload_failed"
    assert (outside / "f").read_text() == "the host's" and len(list(outside.iterdir())) == 1
    for path in ("/proc/x", "/run/x", "/dev/x"):
        with pytest.raises(InfraError, match="made anew"):
            box.write(path, b"x")


def test_mounts_follow_no_link(make, tmp_path):
    """An agent moves what lies above a mount, leaves a link there, and the holder ends."""
    target, source = tmp_path / "target", tmp_path / "volume"
    target.mkdir()
    source.mkdir()
    (source / "f").write_text("from the host")
    box = make(
        volumes=[Volume(source=str(source), target="/a/b/volume"), Volume(source=str(source / "f"), target="/c/f")]
    )
    script = f"mv /a /a2 && ln -s {target} /a; mv /c /c2; mkdir /c; mv /var/lib /var/lib2; ln -s {target} /var/lib; "
    box.exec(script + f"rm -rf /root; ln -s {target} /root; mkdir -p /x; mv /usr /etc /x", timeout=30)
    (pid,) = holders(box._folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: holders(box._folder) == [])
    assert ok(box, "cat /a/b/volume/f /c/f; ls /usr/bin/env; ls -d /var/lib/*").startswith(
        b"from the hostfrom the host/usr/bin/env"
    )
    assert list(target.iterdir()) == [] and (source / "f").read_text() == "from the host"
    assert box.exec("echo x >/a/b/volume/f; echo x >/c/f; rm -rf /c /a/b/volume", timeout=30).exit_code != 0
    assert (source / "f").read_text() == "from the host"


def test_secrets_stay_secret(make):
    if os.geteuid() != 0:
        pytest.skip("only root's sandboxes could read them")
    box = make()
    script = "rm -rf /etc/shadow /etc/ssh; cat /etc/shadow /etc/ssh/*; mkdir /etc/ssh; mv /etc/ssl /etc/ssl2; cat /etc/ssl2/private/*; "
    r = box.exec("cat /etc/shadow /etc/gshadow /etc/sudoers; ls -A /etc/ssh /etc/ssl/private; " + script, timeout=30)
    assert b"root:" not in r.output and b"_key" not in r.output and b"ALL" not in r.output
    r = box.exec("cat /etc/shadow* /proc/1/root/etc/shadow; ls /etc/ssh /etc/ssl2/private", timeout=30)
    assert b"root:" not in r.output and b"_key" not in r.output
    # Nor the host's root, nor what holds the mounts, through any process that is seen.
    r = box.exec(
        f"ls -d /proc/[0-9]*/root/root/.ssh /proc/[0-9]*/root{REPOSITORY}; cat /proc/[0-9]*/environ | tr '\\0' '\\n'",
        timeout=30,
    )
    assert holder.MARK.encode() not in r.output and f"/root{REPOSITORY}".encode() not in r.output.split(b"cannot")[0]


def test_what_is_mounted_inside_is_read_only(runtime, tmp_path):
    """The machine's mounts below its folders: here a temporary one, in mounts of this test's own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    script = "mount -t tmpfs none /usr/local/games && echo seen >/usr/local/games/f && mount -t tmpfs none /etc/ssh && "
    script += f"echo key >/etc/ssh/key && exec {sys.executable} -c '{ONE}' {tmp_path} '{to_json(SPEC).decode()}' "
    script += "'cat /usr/local/games/f /etc/ssh/*; touch /usr/local/games/x /etc/ssh/mine; ls /etc/ssh'"
    r = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=REPOSITORY, timeout=60
    )
    assert r.stdout.startswith("overlay") and "seen" in r.stdout and "Read-only file system" in r.stdout, r
    assert "key" not in r.stdout and "mine" in r.stdout


def test_what_it_puts_in_place_of_programs_is_its_own(make, tmp_path):
    """Nobody else runs it: not what carries files, not what stops, mounts again or removes."""
    box = make()
    script = "printf '#!/bin/sh\\n: >>/work/ran\\n' >evil; chmod 755 evil; cp evil /usr/local/bin/; "
    script += "for f in env sleep tar cat mount nsenter python3; do rm -f /usr/bin/$f; cp evil /usr/bin/$f; done; cat"
    ok(box, script)
    ok(box, "rm ran")
    box.write("/usr/bin/f", b"x")
    box.download("/usr/bin/f", tmp_path / "f", limit=10)
    box.changes(tmp_path / "c.tar", under="/usr", baseline=box.baseline("/usr"), limit=1 << 22)
    box.stop()
    holder.end(holder.find(box._folder))
    assert ok(box, "[ ! -e ran ] && echo not run") == b"not run"


def test_the_proxy_needs_no_program_of_the_sandbox_s(runtime, proxy):
    box = runtime.create(SPEC, labels={"a": "1"}, proxy=proxy.endpoint, timeout=30)
    try:
        ok(box, "rm -f /usr/bin/python3* /usr/local/bin/python3*")
        port = box.ref.proxy_url.rpartition(":")[2]
        ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET /x HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3"
        assert b"proxy saw /x" in ok(box, ["bash", "-c", ask])
    finally:
        box.destroy()


# -- limits, the end


def test_writes_count_against_the_disk(make):
    box = make(disk_mb=20)
    fill = "i=0; while true; do head -c 1000000 /dev/zero >/usr/lib/fill$i || exit 9; i=$((i+1)); sleep 0.01; done"
    r = box.exec(fill, timeout=90)
    assert r.exit_code == 137 and b"disk_mb" in r.output


def test_a_killed_worker_leaves_nothing(tmp_path):
    """At many moments of a sandbox's life, then the janitor."""
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    if why := local_cow.support(runtime.data_dir).missing():
        pytest.skip(f"no copy-on-write root on this machine: {why}")
    argv = [sys.executable, "-c", ONE, str(tmp_path), to_json(SPEC).decode(), "touch /usr/bin/x; sleep 60"]
    seen = 0
    for wanted in range(6):
        worker = subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        try:
            # A record, a folder, the first holder, a mounted one, and a while later.
            steps = (
                lambda: runtime.list({}),
                lambda: list(runtime.root.glob("*/mask")),
                lambda: holders(tmp_path),
                lambda: list(runtime.root.glob("*/holder")),
                lambda: list(runtime.root.glob("*/upper/usr/bin/x")),
                lambda: list(runtime.root.glob("*/upper/usr/bin/x")) and not time.sleep(0.3),
            )
            end = time.monotonic() + 60
            while not steps[wanted]():
                assert time.monotonic() < end
        finally:
            worker.kill()
            worker.wait()
        for ref in runtime.list({"a": "1"}):
            seen += 1
            runtime.attach(ref).stop()
            runtime.attach(ref).destroy()
        until(lambda: holders(tmp_path) == [])
        assert list(runtime.root.iterdir()) == [], wanted
    assert seen == 6
    assert [p for p in procs.scan() if p != os.getpid() and procs.argv_contains(p, str(tmp_path).encode())] == []


def test_no_holder_comes_after_the_end(runtime, make):
    """A command that wants one while the sandbox is being removed."""
    box = make()
    (pid,) = holders(box._folder)
    again, results = runtime.attach(box.ref), []

    def command() -> None:
        try:
            again.exec("true", timeout=30)
        except InfraError as e:
            results.append(e)

    t = threading.Thread(target=command)

    def everything(_: bool) -> None:
        assert not holders(box._folder) and pid
        t.start()  # it waits for the lock

    box._cow.end(everything)
    t.join()
    assert results[0].code == "exec_failed" and "gone" in results[0].message and holders(box._folder) == []


# -- what else is promised


def test_a_working_directory_among_the_system_s(make):
    box = make(workdir="/usr/src/polar-app")
    assert ok(box, "pwd") == b"/usr/src/polar-app"
    box.write("f", b"x")
    assert ok(box, "pwd; ls") == b"/usr/src/polar-app f" and not os.path.exists("/usr/src/polar-app")


@pytest.mark.parametrize("quick", [True, False])
def test_nothing_of_the_way_in_stays_open(make, monkeypatch, quick):
    which = shutil.which
    if quick and not which("nsenter"):
        pytest.skip("no nsenter on this machine")
    monkeypatch.setattr(
        shutil, "which", lambda name, *a, **k: which(name, *a, **k) if quick or name != "nsenter" else None
    )
    listed = (
        make().exec("ls -l /proc/self/fd; ls -l /proc/$$/fd; touch /usr/bin/polar-x && echo fine", timeout=30).output
    )
    assert listed.endswith(b"fine\n") and not any(
        word in listed for word in (b"mnt:[", b"user:[", b"socket:", b"memfd")
    )


def test_the_distribution_s_bubblewrap(make, monkeypatch):
    binary = shutil.which("bwrap")
    if binary is None or binary == FOUND.binary:
        pytest.skip("there is one bubblewrap only")
    version = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.split()[-1]
    monkeypatch.setattr(bwrap, "find", lambda: bwrap.Bwrap(binary, version, FOUND.flags))
    box = make()
    ok(box, WRITE)
    assert ok(box, SEE) == SEEN


def test_an_ordinary_user(runtime, public):
    """The same as an ordinary user of this machine, to whom none of its folders belongs."""
    argv = ordinary_python(public)
    (public / "data").mkdir()
    os.chown(public / "data", 65534, 65534)
    for user in (None, "root"):
        spec = to_json(RuntimeSpec(options=COW, user=user)).decode()
        scripts = (
            f"{WRITE}rm -r /usr/include; mkdir /usr/include",
            f"{SEE}; echo x >>/var/lib/dpkg/lock && id -u; ls /usr/include",
        )
        done = subprocess.run(
            [*argv, ONE, str(public / "data"), spec, *scripts], capture_output=True, text=True, cwd="/", timeout=300
        )
        if "no copy-on-write root on this machine" in done.stderr:
            pytest.skip(f"not for ordinary users here: {done.stderr.strip().splitlines()[-1]}")
        assert done.stdout.split("\n", 1)[0] == "overlay", done.stderr
        assert " ".join(done.stdout.split()[1:]) == f"{SEEN.decode()} {'65534' if user is None else '0'}"
    assert holders(public) == [] and list((public / "data" / "sandboxes").iterdir()) == []
