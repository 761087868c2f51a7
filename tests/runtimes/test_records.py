"""Records of sandboxes on this host, and what a writer leaves who dies in the middle."""

from __future__ import annotations

import errno
import os
import signal
import threading

import pytest

from polar.config import Settings
from polar.errors import InfraError
from polar.sandbox import SandboxRef
from polar.task import RuntimeSpec
from runtimes import records
from runtimes.apptainer import ApptainerRuntime
from runtimes.apptainer_sandbox import Record as ApptainerRecord
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


@pytest.mark.parametrize("found", [b"", b"\0" * 100, b'{"ref":', b"{}", b"\xff"])
def test_a_record_that_cant_be_read_hides_no_other(tmp_path, caplog, found):
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    broken, box = (runtime.create(PLAIN, labels={"a": "1"}, proxy=None, timeout=10) for _ in range(2))
    path = runtime.record_path(broken.ref.handle)
    path.write_bytes(found)
    for _ in range(2):
        assert runtime.list({"a": "1"}) == [box.ref]
    assert [str(path) in r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [True]  # once
    with pytest.raises(InfraError, match="record can't be read"):
        runtime.attach(broken.ref)
    broken.destroy()  # who made it still can
    box.destroy()
    assert list(runtime.root.iterdir()) == []


def test_a_record_that_is_only_not_read_now_is_not_passed_over(tmp_path, monkeypatch):
    """Else an image that a living sandbox lies over would be thought unused."""
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    box = runtime.create(PLAIN, labels={}, proxy=None, timeout=10)

    def no_more(path):
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as m, pytest.raises(InfraError):
        m.setattr("pathlib.Path.read_bytes", no_more)
        runtime.list({})
    box.destroy()


def test_images_in_use_are_known_beside_a_broken_record(tmp_path):
    runtime = ApptainerRuntime(Settings(data_dir=str(tmp_path)))
    runtime.records.mkdir(parents=True)
    ref = SandboxRef(backend="apptainer", handle="sandbox-0123456789ab", proxy_url="", workdir="/work")
    records.save(runtime.records / "a.json", ApptainerRecord(ref=ref, image_key="k"))
    (runtime.records / "b.json").touch()
    assert runtime.images._in_use() == {"k"}


def test_a_record_is_on_disk_before_it_is_seen(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        told = lambda *a, name=name, real=real: (done.append(name), real(*a))  # noqa: E731
        monkeypatch.setattr(records.os, name, told)
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    runtime.create(PLAIN, labels={}, proxy=None, timeout=10).destroy()
    assert done == ["fsync", "replace", "fsync"]
