"""What is special about `local`: records on disk, the choice of isolation, limits."""

from __future__ import annotations

import logging
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.config import Settings
from polar.errors import InfraError, UnsupportedSpec
from polar.sandbox import ProxyEndpoint
from polar.task import RuntimeSpec, Volume
from runtimes import bwrap
from runtimes.local import LocalRuntime
from runtimes.local_sandbox import LocalSandbox

needs_bwrap = pytest.mark.skipif(isinstance(bwrap.find(), str), reason=f"no working bubblewrap: {bwrap.find()}")
PLAIN = RuntimeSpec(options={"isolation": "none"})
READ_ONLY = {"isolation": "bwrap", "root": "read-only"}


@pytest.fixture
def runtime(tmp_path) -> LocalRuntime:
    return LocalRuntime(Settings(data_dir=str(tmp_path / "data")))


@pytest.mark.parametrize("where", ["make", "chmod"])
def test_whatever_exists_is_found_by_its_labels(runtime, monkeypatch, where):
    """A worker killed right after the record was written, or half-way through making the folders."""

    def die(self):
        if where == "chmod":
            (self._files / "work").mkdir(parents=True)
        raise KeyboardInterrupt  # as good as a kill: nothing cleans up

    monkeypatch.setattr(LocalSandbox, "make", die)
    with pytest.raises(KeyboardInterrupt):
        runtime.create(PLAIN, labels={"a": "1"}, proxy=None, timeout=10)
    (ref,) = runtime.list({"a": "1"})
    runtime.attach(ref).stop()
    runtime.attach(ref).destroy()
    assert list(runtime.root.iterdir()) == []


def test_a_failed_creation_leaves_nothing(runtime, monkeypatch):
    def fail(self):
        (self._files / "work").mkdir(parents=True)
        raise OSError("the disk is full")

    monkeypatch.setattr(LocalSandbox, "make", fail)
    with pytest.raises(InfraError, match="the disk is full") as e:
        runtime.create(PLAIN, labels={"a": "1"}, proxy=None, timeout=10)
    assert e.value.code == "runtime_create_failed" and e.value.retryable
    assert list(runtime.root.iterdir()) == []


def test_a_destroy_that_was_cut_off_is_finished(runtime, monkeypatch):
    box = runtime.create(PLAIN, labels={"a": "1"}, proxy=None, timeout=10)
    with monkeypatch.context() as m, pytest.raises(InfraError):
        m.setattr("runtimes.tree.remove", lambda p: (_ for _ in ()).throw(OSError("cut off")))
        box.destroy()
    (ref,) = runtime.list({"a": "1"})
    runtime.attach(ref).destroy()
    assert runtime.list({}) == [] and list(runtime.root.iterdir()) == []


def test_two_destroys_at_once(runtime):
    for _ in range(5):
        box = runtime.create(PLAIN, labels={}, proxy=None, timeout=10)
        assert box.exec("mkdir $(seq 50); touch $(seq 100 150)", timeout=30).exit_code == 0
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda ref: runtime.attach(ref).destroy(), [box.ref] * 4)) == [None] * 4
        assert list(runtime.root.iterdir()) == []


def test_records_are_private(runtime):
    box = runtime.create(
        RuntimeSpec(env={"TOKEN": "s3cret"}, options={"isolation": "none"}), labels={}, proxy=None, timeout=10
    )
    record = runtime.record_path(box.ref.handle)
    assert stat.S_IMODE(record.stat().st_mode) == 0o600 and stat.S_IMODE(runtime.root.stat().st_mode) == 0o700
    assert "s3cret" not in str(box.ref)
    box.destroy()


@pytest.mark.parametrize("handle", ["../x", "/etc", "a/b", ""])
def test_a_handle_is_no_path(runtime, handle):
    from polar.sandbox import SandboxRef

    ref = SandboxRef(backend="local", handle=handle, proxy_url="", workdir="/work")
    with pytest.raises(InfraError, match="no handle"):
        runtime.attach(ref)


def test_plain_says_that_it_is_unsandboxed(runtime, caplog):
    with caplog.at_level(logging.WARNING, "polar.local"):
        box = runtime.create(PLAIN, labels={}, proxy=ProxyEndpoint(url="http://127.0.0.1:5"), timeout=10)
    assert "UNSANDBOXED" in caplog.text
    assert box.ref.state["isolation"] == "none" and box.ref.proxy_url == "http://127.0.0.1:5"
    box.destroy()


def test_auto_without_bubblewrap(runtime, monkeypatch):
    monkeypatch.setattr(bwrap, "find", lambda: "not here")
    ok, text = runtime.available()
    assert ok and "UNSANDBOXED" in text and "not here" in text
    box = runtime.create(RuntimeSpec(), labels={}, proxy=None, timeout=10)
    assert box.ref.state["isolation"] == "none"
    box.destroy()
    with pytest.raises(InfraError, match="not here") as e:
        runtime.create(RuntimeSpec(options={"isolation": "bwrap"}), labels={}, proxy=None, timeout=10)
    assert e.value.code == "runtime_create_failed" and not e.value.retryable
    for spec in (
        RuntimeSpec(network="none"),
        RuntimeSpec(workdir="/x"),
        RuntimeSpec(volumes=[Volume(source="/srv/a", target="/a")]),
    ):
        runtime.check(spec)  # another node may have it
        with pytest.raises(UnsupportedSpec, match="without bubblewrap"):
            runtime.create(spec, labels={}, proxy=None, timeout=10)
    assert list(runtime.root.iterdir()) == []


@needs_bwrap
def test_auto_with_bubblewrap(runtime):
    box = runtime.create(RuntimeSpec(), labels={}, proxy=None, timeout=10)
    assert box.ref.state["isolation"] == "bwrap"
    r = box.exec("grep CapEff /proc/self/status; ls /proc | grep -c '^[0-9]'; unshare -Ur true", timeout=10)
    words = r.output.decode().split()
    assert words[1] == "0" * 16 and int(words[2]) < 8 and r.exit_code != 0
    box.destroy()


@needs_bwrap
def test_the_host_is_out_of_sight(runtime, tmp_path):
    (tmp_path / "seen").write_text("the host's")
    box = runtime.create(RuntimeSpec(), labels={}, proxy=None, timeout=10)
    r = box.exec(
        f"cat {tmp_path}/seen {runtime.data_dir}/*; ls -a /home /root /var /srv /mnt {Path.home()}", timeout=10
    )
    assert b"the host's" not in r.output
    assert b"bash" not in r.output and b".ssh" not in r.output
    box.destroy()


@needs_bwrap
def test_a_read_only_root(runtime):
    box = runtime.create(RuntimeSpec(options=READ_ONLY), labels={}, proxy=None, timeout=10)
    assert box.ref.state["root"] == "read-only"
    r = box.exec(
        "for f in /usr/x /etc/x /bin/x /opt/x /x; do touch $f && echo WROTE $f; done; rm -f /usr/bin/env", timeout=10
    )
    assert b"WROTE" not in r.output and r.exit_code != 0
    with pytest.raises(InfraError, match="keeps it read-only"):
        box.write("/usr/local/bin/x", b"")
    box.destroy()


@needs_bwrap
def test_data_below_a_visible_folder_is_hidden(monkeypatch):
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # /tmp is the sandbox's own inside
        monkeypatch.setattr(bwrap, "SYSTEM", (*bwrap.SYSTEM, folder))
        runtime = LocalRuntime(Settings(data_dir=f"{folder}/data"))
        Path(folder, "beside").write_text("seen")
        box = runtime.create(RuntimeSpec(), labels={}, proxy=None, timeout=10)
        r = box.exec(f"cat {folder}/beside; ls -A {folder}/data; touch here && echo works", timeout=10)
        assert r.output == b"seenworks\n"
        box.destroy()


@needs_bwrap
def test_secrets_are_not_in_the_process_list(runtime, tmp_path):
    box = runtime.create(RuntimeSpec(env={"A": "spec-s3cret"}), labels={}, proxy=None, timeout=10)
    seen = []

    def cancelled() -> bool:
        for p in Path("/proc").iterdir():
            if p.name.isdigit():
                try:
                    seen.append((p / "cmdline").read_bytes())
                except OSError:
                    pass
        return any(box.ref.handle.encode() in s for s in seen)

    assert box.exec("sleep 60", env={"B": "exec-s3cret"}, timeout=60, cancelled=cancelled).cancelled
    assert not any(b"s3cret" in s for s in seen)
    box.destroy()


@pytest.mark.parametrize("isolation", ["none", pytest.param("bwrap", marks=needs_bwrap)])
def test_rlimits(runtime, isolation):
    limits = {"address_space_mb": 200, "file_size_mb": 1, "open_files": 64, "cpu_seconds": 5}
    box = runtime.create(
        RuntimeSpec(options={"isolation": isolation, "rlimits": limits}), labels={}, proxy=None, timeout=10
    )
    assert box.exec("ulimit -v; ulimit -n; ulimit -t; ulimit -c", timeout=10).output.split() == [
        b"204800",
        b"64",
        b"5",
        b"0",
    ]
    assert box.exec("head -c 3000000 /dev/zero > big; wc -c < big", timeout=10).output.split()[-1] == b"1048576"
    assert box.exec(["python3", "-c", "x = b'1' * (300 << 20)"], timeout=20).exit_code == 1
    box.destroy()


@needs_bwrap
def test_an_agent_that_swaps_its_folders_for_links(runtime, tmp_path):
    """The next command's mounts must not follow them."""
    box = runtime.create(RuntimeSpec(workdir="/a/work", options=READ_ONLY), labels={}, proxy=None, timeout=10)
    target = tmp_path / "target"
    target.mkdir()
    box.write("/tests/x", b"1")
    box.exec(
        f"rmdir /a/work; mv /a /b; rm -rf /tests; ln -s /oldroot{target} /tests; cd /; rm -rf /home/agent; ln -s /oldroot{target} /tmp/x",
        timeout=10,
    )
    assert box.exec("pwd; test -d ~ && echo ok", timeout=10).output.split() == [b"/a/work", b"ok"]
    assert list(target.iterdir()) == []
    box.destroy()


@needs_bwrap
def test_a_sandbox_that_can_t_be_entered_is_no_result(runtime, tmp_path):
    (tmp_path / "volume").mkdir()
    spec = RuntimeSpec(volumes=[Volume(source=str(tmp_path / "volume"), target="/v")], options=READ_ONLY)
    box = runtime.create(spec, labels={}, proxy=None, timeout=10)
    assert box.exec("exit 1", timeout=10).exit_code == 1
    (tmp_path / "volume").rmdir()
    with pytest.raises(InfraError, match="can't be entered") as e:
        box.exec("exit 0", timeout=10)
    assert e.value.code == "exec_failed"
    box.destroy()
    with pytest.raises(InfraError, match="no such volume source"):
        runtime.create(spec, labels={}, proxy=None, timeout=10)
    assert list(runtime.root.iterdir()) == []
