"""Attacks on the copy-on-write root of `local` sandboxes that were once possible."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from polar import changes
from polar.errors import InfraError
from runtimes import bwrap, holder, procs
from tests.runtimes.conftest import until
from tests.runtimes.cow import cow_make, cow_runtime, needs_bwrap, ok  # noqa: F401

pytestmark = needs_bwrap


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """Files below a machine folder that ordinary users can't read."""
    if os.geteuid() != 0:
        pytest.skip("only root can put something into /usr/local")
    folder = Path("/usr/local/etc", f"polar-review-{os.getpid()}")
    (folder / "for-some").mkdir(parents=True)
    (folder / "for-some" / "f").write_text("top secret")
    (folder / "for-some").chmod(0o750)
    (folder / "key").write_text("top secret")
    (folder / "key").chmod(0o600)
    (folder / "plain").write_text("for everybody")
    bwrap._closed.cache_clear()
    yield folder
    subprocess.run(["rm", "-rf", str(folder)], check=True)
    bwrap._closed.cache_clear()


@pytest.mark.parametrize("root", ["overlay", "read-only"])
def test_what_is_closed_to_ordinary_users_is_not_read(make, closed, root, tmp_path):
    """A worker that is root could read it, and so could its sandboxes."""
    box = make(options={"root": root})
    r = box.exec(f"cd {closed}; cat plain; cat key for-some/f; stat -c %a . for-some", timeout=30)
    assert b"for everybody" in r.output and b"top secret" not in r.output
    if root == "overlay":
        ok(box, f"mv {closed} {closed}-moved; ls {closed}-moved")
        r = box.exec(f"cat {closed}-moved/key {closed}-moved/*/f", timeout=30)
        assert b"top secret" not in r.output
        assert box.changes(tmp_path / "c.tar", under="/usr", baseline=b"", limit=1 << 20) is False
        assert not any("for-some/f" in p for p in changes.removed(tmp_path / "c.tar"))


def test_another_process_with_the_holders_number_is_not_entered(make):
    """It may be an agent's: what is started in its mounts, with the worker's rights, would be the agent's program."""
    box, other = make(), make()
    other.write(
        "/usr/bin/evil", b"#!/bin/sh\nid -u >/work/evil; grep CapEff /proc/self/status >>/work/evil\n", mode=0o755
    )
    threading.Thread(target=lambda: other.exec("touch /work/up; sleep 30", timeout=40), daemon=True).start()
    until(lambda: other.exec("test -e /work/up", timeout=30).exit_code == 0)
    ours = f"POLAR_SANDBOX={other.ref.handle}".encode()
    pid = next(p for p in procs.scan() if procs.environ_has(p, ours) and procs.argv_has(p, b"sleep"))
    found = holder.find(box._folder)
    with pytest.raises(ProcessLookupError):
        argv, _ = holder.entering(found._replace(pid=pid), -1, 1, ["/usr/bin/evil"])
        subprocess.run(argv, timeout=20)
    assert b"CapEff" not in other.exec("cat /work/evil", timeout=30).output
    with pytest.raises(InfraError), box._cow._seen_by(found._replace(pid=pid)):
        pass


def test_files_that_went_nowhere_are_told(make):
    """The holder ends while an upload goes on: it may have come into no mount of the sandbox's."""
    box = make()
    found = holder.find(box._folder)
    with pytest.raises(InfraError, match="mounts are gone") as e, box._cow.files("upload_failed"):
        holder.end(found)
    assert e.value.code == "upload_failed"


def test_no_descriptor_of_the_workers_is_inherited(make):
    box = make()
    listed = ok(box, "ls -l /proc/self/fd /proc/1/fd")
    assert b"mnt:[" not in listed and b"socket:[" not in listed and b"/root" not in listed


def test_limits_hold_where_the_agent_replaced_the_shell(make):
    box = make(open_files=64, disk_mb=8)
    ok(box, "cp /bin/sh /usr/bin/real-sh")
    fake = '#!/usr/bin/real-sh\nwhile [ "$1" != run ]; do shift; done; shift; exec "$@"\n'
    box.write("/usr/bin/dash", fake.encode(), mode=0o755)
    seen = ok(box, ["run", "/usr/bin/real-sh", "-c", "ulimit -n; ulimit -f; ulimit -c; cat /proc/self/oom_score_adj"])
    assert seen == b"64 16384 0 500"


@pytest.mark.parametrize("root", ["overlay", "read-only"])
def test_a_tasks_environment_means_nothing_to_programs_of_the_host(make, root, tmp_path):
    """The loader of nsenter and bubblewrap would write there, or load from there, with the worker's rights."""
    at = str(tmp_path)
    env = {"LD_DEBUG": "files", "LD_DEBUG_OUTPUT": f"{at}/written", "LD_PRELOAD": f"{at}/x.so", "PATH": "/usr/bin"}
    box = make(options={"root": root}, env=env)
    r = box.exec('echo "$EXTRA $PATH"', env={"EXTRA": "two\nlines --bind / /", "LD_BIND_NOW": "1"}, timeout=30)
    assert b"two\nlines --bind / / /usr/bin\n" in r.output
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InfraError):
        box.exec("true", env={"A": "b\0--bind\0/\0/h"}, timeout=30)
