"""The parts that bound a sandbox: control groups on both versions, the system call filter, the disk's watch."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest

from polar.sandbox import ExecResult
from runtimes import cgroups, procs, seccomp
from runtimes.cgroups import Cgroups, Limits
from runtimes.disk import DiskWatch, usage


def tree(root, own, *, delegated=True, controllers="cpu memory pids io"):
    """A version 2 hierarchy as the kernel shows it, of plain files."""
    for folder in (root, root / own):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").write_text(controllers)
        (folder / "cgroup.subtree_control").write_text("")
        (folder / "cgroup.procs").write_text("")
    if delegated:
        os.setxattr(root / own, "user.delegate", b"1")
    return root


@pytest.fixture(autouse=True)
def user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


def test_version_2_in_a_delegated_group(tmp_path):
    found = cgroups._version2(tree(tmp_path, "user.slice/polar.scope"), "user.slice/polar.scope")
    assert isinstance(found, Cgroups) and found.version == 2
    base = tmp_path / "user.slice/polar.scope"
    assert set((base / "cgroup.subtree_control").read_text().split()) == {"+cpu", "+memory", "+pids"}
    found.make("box", Limits(cpus=1.5, memory=1 << 20, pids=7))
    group = base / "polar-box-box"
    assert (group / "memory.max").read_text() == str(1 << 20)
    assert (group / "cpu.max").read_text() == "150000 100000" and (group / "pids.max").read_text() == "7"
    (group / "cgroup.procs").write_text("5\n6\n")
    assert found.members("box") == {5, 6} and found.names() == {"box"}
    for f in group.iterdir():
        f.unlink()
    found.remove("box")
    found.remove("box")
    assert found.names() == set()


def test_version_2_from_the_leaf_that_an_earlier_process_moved_to(tmp_path):
    own = f"polar.scope/{cgroups.HOST_GROUP}"
    found = cgroups._version2(tree(tree(tmp_path, own, delegated=False), "polar.scope"), own)
    assert isinstance(found, Cgroups)
    found.make("x", Limits())
    assert (tmp_path / "polar.scope" / "polar-box-x").is_dir()


def test_version_2_that_isn_t_ours(tmp_path, monkeypatch):
    plain = tree(tmp_path, "a", delegated=False)
    assert "delegated" in cgroups._version2(plain, "a")
    monkeypatch.setenv(cgroups.VARIABLE, "delegated")
    assert isinstance(cgroups._version2(plain, "a"), Cgroups)
    assert "memory" in cgroups._version2(tree(tmp_path / "b", "a", controllers="cpu pids"), "a")


@pytest.fixture
def systemctl(tmp_path, monkeypatch):
    """A `systemctl` that knows one delegated unit, and says how it was asked."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "systemctl"
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    asked = tmp_path / "asked"

    def answer(group, delegate="yes"):
        program.write_text(f'#!/bin/sh\necho "$@" >{asked}\necho Delegate={delegate}\necho ControlGroup={group}\n')
        program.chmod(0o755)
        return asked

    return answer


def test_version_2_that_only_systemd_knows_to_be_ours(tmp_path, systemctl):
    own = "user.slice/user@1000.service/app.slice/run-1.scope"
    root = tree(tmp_path / "root", own, delegated=False)
    systemctl(f"/{own}", "no")
    assert "delegated" in cgroups._version2(root, own)
    systemctl("/user.slice/another/run-1.scope")
    assert "delegated" in cgroups._version2(root, own)
    asked = systemctl(f"/{own}")
    assert isinstance(cgroups._version2(root, own), Cgroups)
    assert asked.read_text().split()[:2] == ["--user", "show"]
    old = tree(tmp_path / "old", "system.slice/polar.service", delegated=False)
    asked = systemctl("/system.slice/polar.service")
    assert isinstance(cgroups._version2(old, "system.slice/polar.service"), Cgroups)
    assert asked.read_text().split()[0] == "show"


def test_version_2_as_root(tmp_path, monkeypatch):
    """A group at the top; in a container the top's own processes move first."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    top = tree(tmp_path / "a", "", delegated=False)
    (top / "polar").mkdir()
    (top / "polar" / "cgroup.controllers").write_text("cpu memory pids")
    for file in ("cgroup.subtree_control", "cgroup.procs"):
        (top / "polar" / file).write_text("")
    found = cgroups._version2(top, "")
    assert isinstance(found, Cgroups) and not (top / cgroups.HOST_GROUP).exists()
    (top / "cgroup.type").write_text("domain")
    (top / "cgroup.procs").write_text("1\n")  # of plain files: it stays there, and that is told
    assert "processes keep coming" in cgroups._version2(top, "")
    assert (top / cgroups.HOST_GROUP / "cgroup.procs").read_text() == "1"
    few = tree(tmp_path / "b", "", delegated=False, controllers="cpu pids")
    assert "kernel has no control group controllers memory" in cgroups._version2(few, "")


def test_removal_kills_what_came_meanwhile(tmp_path):
    found = cgroups._version2(tree(tmp_path, "a"), "a")
    found.make("box", Limits())
    group = tmp_path / "a" / "polar-box-box"
    (group / "below" / "deeper").mkdir(parents=True)
    (group / "below" / "cgroup.procs").write_text("7\n")
    assert found.members("box") == {7}
    (group / "below" / "cgroup.procs").unlink()
    found.remove("box")
    assert not group.exists()
    found.make("box", Limits())
    (group / "cgroup.kill").write_text("")
    with pytest.raises(OSError):  # of plain files: it can't go
        found.remove("box", timeout=0.05)
    assert (group / "cgroup.kill").read_text() == "1"


def test_who_began_after_the_scan_is_met_in_the_next():
    """A control group names processes that the scan of /proc before it couldn't see."""
    nobody = int(Path("/proc/sys/kernel/pid_max").read_text()) + 1
    picks = iter([{nobody}, {nobody}, set()])
    assert procs.kill_all(lambda all: next(picks))
    assert not procs.kill_all(lambda all: {nobody}, timeout=0.01)


def test_version_1_needs_root_and_all_controllers(tmp_path):
    for name in ("cpu", "memory"):
        (tmp_path / name).mkdir()
    assert "pids" in cgroups._version1(tmp_path)
    (tmp_path / "pids").mkdir()
    found = cgroups._version1(tmp_path)
    assert isinstance(found, Cgroups) and found.version == 1
    found.make("box", Limits(memory=4096, cpus=0.5, pids=3))
    assert (tmp_path / "memory/polar/polar-box-box/memory.limit_in_bytes").read_text() == "4096"
    assert (tmp_path / "cpu/polar/polar-box-box/cpu.cfs_quota_us").read_text() == "50000"


def test_forgotten_groups_go_and_come_back(tmp_path):
    found = cgroups._version2(tree(tmp_path, "a"), "a")
    (tmp_path / "a" / "polar-box-old").mkdir()
    (tmp_path / "a" / "polar-box-new").mkdir()
    (tmp_path / "a" / "polar-box-busy").mkdir()
    (tmp_path / "a" / "polar-box-busy" / "cgroup.procs").write_text("1")  # as good as a process: it can't be removed
    for name in ("old", "busy"):
        os.utime(tmp_path / "a" / f"polar-box-{name}", (0, 0))
    found.forget()
    assert found.names() == {"new", "busy"}


def run_filter(machine: str, number: int, arch: int, *args: int) -> int:
    """What the filter answers, by interpreting it as the kernel does."""
    code, data = seccomp.program(machine), struct.pack("=iIQ6Q", number, arch, 0, *(args + (0,) * 6)[:6])
    instructions, pc, a = [struct.unpack_from("=HBBI", code, i) for i in range(0, len(code), 8)], 0, 0
    for _ in range(10_000):
        op, jt, jf, k = instructions[pc]
        pc += 1
        if op == 0x20:
            (a,) = struct.unpack_from("=I", data, k)
        elif op == 0x54:
            a &= k
        elif op == 0x06:
            return k
        else:
            hit = {0x15: a == k, 0x35: a >= k, 0x45: bool(a & k)}[op]
            pc += jt if hit else jf
    raise AssertionError("no end")


X86, ARM = ("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS


@pytest.mark.parametrize(
    ("machine", "number", "args", "answer"),
    [
        (X86, 0, (), ALLOW), (X86, 59, (), ALLOW), (X86, 165, (), EPERM), (X86, 435, (), ENOSYS),
        (X86, 56, (0x01200011,), ALLOW), (X86, 56, (0x10000011,), EPERM), (X86, 56, (0x3D0F00,), ALLOW),
        (X86, 101, (0,), ALLOW), (X86, 101, (16,), EPERM), (X86, 101, (0x4206,), EPERM), (X86, 101, (7,), ALLOW),
        (X86, 16, (0, 0x5412), EPERM), (X86, 16, (0, 0x5413), ALLOW),
        (X86, 133, (0, 0o020666), EPERM), (X86, 133, (0, 0o010666), ALLOW), (X86, 259, (0, 0, 0o060666), EPERM),
        (X86, 0x40000000 + 165, (), ENOSYS), (X86, 321, (), EPERM), (X86, 231, (), ALLOW),
        (ARM, 40, (), EPERM), (ARM, 63, (), ALLOW), (ARM, 220, (0x10000000,), EPERM), (ARM, 220, (0x11,), ALLOW),
        (ARM, 117, (16,), EPERM), (ARM, 33, (0, 0, 0o020600), EPERM), (ARM, 165, (), ALLOW),
    ],
)  # fmt: skip
def test_the_filter(machine, number, args, answer):
    assert run_filter(machine[0], number, machine[1], *args) == answer


def test_foreign_conventions_fail():
    assert run_filter("x86_64", 0, 0x40000003) == EPERM
    assert len(seccomp.program("x86_64")) // 8 < 256 * 4  # and no jump is longer than a byte tells


def test_usage_counts_blocks_once(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"x" * 100_000)
    one = usage(tmp_path)
    os.link(tmp_path / "d" / "f", tmp_path / "same")
    with open(tmp_path / "sparse", "wb") as f:
        f.truncate(1 << 30)
    assert 100_000 <= one <= 200_000 and usage(tmp_path) == one
    assert usage(tmp_path / "nothing") == 0


def test_the_watch_passes_the_caller_s_wish_on(tmp_path):
    wish = []
    watch = DiskWatch(tmp_path, 1 << 20, lambda: bool(wish))
    assert not watch()
    wish.append(1)
    assert watch() and not watch.exceeded
    over = DiskWatch(tmp_path, 1000, None)
    over._next = 0
    (tmp_path / "f").write_bytes(b"x" * 50_000)
    assert over() and over.exceeded


def test_the_watch_sees_what_was_quicker_than_it(tmp_path):
    done = ExecResult(exit_code=0, output=b"out")
    quick = DiskWatch(tmp_path, 10_000, None)
    assert quick.told(done) == done
    (tmp_path / "f").write_bytes(b"x" * 50_000)
    told = quick.told(done)
    assert told.exit_code == 137 and told.output.startswith(b"out\nkilled: more than")
    # In the full folder one may read and remove, and write no more.
    reads = DiskWatch(tmp_path, 10_000, None)
    assert reads.told(done) == done
    (tmp_path / "g").write_bytes(b"x" * 50_000)
    assert reads.told(done).exit_code == 137
    removes = DiskWatch(tmp_path, 10_000, None)
    (tmp_path / "g").unlink()
    assert removes.told(done) == done
