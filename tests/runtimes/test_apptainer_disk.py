"""`disk_mb` of `apptainer` where the kernel keeps it: what the agent sees at the limit, and that nothing is left."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar import changes
from polar.config import Settings
from polar.errors import InfraError, UnsupportedSpec
from polar.sandbox import Sandbox
from polar.task import RuntimeSpec
from runtimes import apptainer_layer, procs
from runtimes.apptainer import DISK_VARIABLE, ApptainerRuntime
from tests.runtimes.conftest import apptainer_folder, apptainer_image, until
from tests.runtimes.killed_worker import leftovers

KINDS = ["file", "memory"]
LIMIT_MB = 40


@pytest.fixture(scope="module")
def settings() -> Iterator[Settings]:
    folder = apptainer_folder()
    made = Settings(data_dir=str(folder))
    apptainer_image(made)
    yield made
    shutil.rmtree(folder)


@pytest.fixture
def runtime(settings) -> Iterator[ApptainerRuntime]:
    made = ApptainerRuntime(settings)
    yield made
    for ref in made.list({}):
        made.attach(ref).destroy()


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    if request.param == "file" and (why := apptainer_layer.no_files()):
        pytest.skip(why)
    return request.param


@pytest.fixture
def make(runtime, kind) -> Callable[..., Sandbox]:
    def made(**fields):
        spec = RuntimeSpec(image="base", disk_mb=LIMIT_MB, options={"disk": kind}, **fields)
        return runtime.create(spec, labels={"t": kind}, proxy=None, timeout=60)

    return made


def run(box: Sandbox, command: str) -> tuple[int | None, str]:
    r = box.exec(command, timeout=90)
    return r.exit_code, r.output.decode()


FILL = (
    "n=bytes=0\ntry:\n"
    " while 1:\n  with open(f'fill{n}','wb',0) as f: bytes+=f.write(b'x'*500_000);n+=1\n"
    "except OSError as e: print(bytes,e.errno)\n"
)
EXHAUST = (  # every name, then every byte
    "import os\nn=0\ntry:\n while 1: os.close(os.open(f'n{n}',os.O_CREAT|os.O_WRONLY));n+=1\n"
    "except OSError as e: print(e.errno)\n"
    "with open('n0','wb',0) as f:\n try:\n  while 1: f.write(b'x'*4096) or 1/0\n except OSError as e: print(e.errno)\n"
)


def test_a_filler_is_told_and_the_sandbox_lives_on(make, runtime, settings, tmp_path):
    box, neighbour = make(), make()
    baseline = box.baseline("/work")
    _, told = run(box, f'python3 -c "{FILL}"')
    filled, error = map(int, told.split())
    assert error == 28 and 0.8 * LIMIT_MB <= filled / (1 << 20) <= LIMIT_MB
    assert used_bytes(box) <= LIMIT_MB << 20
    # One large file meets the same end, not a signal.
    assert "No space left" in run(box, "rm fill*; head -c 80000000 /dev/zero >one")[1]
    with pytest.raises(InfraError, match="No space left") as e:
        box.write("more", b"x" * 5_000_000)
    assert e.value.code == "upload_failed"
    assert run(box, "rm one; rm -r /usr/share/doc; echo fine >after; cat after") == (0, "fine\n")
    assert run(neighbour, "head -c 10000000 /dev/zero >f && echo room") == (0, "room\n")
    box.stop()
    # As another worker would, after this one's death.
    again = ApptainerRuntime(settings).attach(box.ref)
    assert not again.changes(tmp_path / "c.tar", under="/work", baseline=baseline, limit=1 << 20)
    assert changes.paths(tmp_path / "c.tar") == ["after"]
    assert not again.changes(tmp_path / "d.tar", under="/usr/share", baseline=b"", limit=1 << 20)
    assert "doc" in changes.removed(tmp_path / "d.tar")
    assert not again.download("after", tmp_path / "after", limit=100)
    assert (tmp_path / "after").read_text() == "fine\n"
    for each in (again, neighbour):
        each.destroy()
    again.destroy()
    until(lambda: not any(leftovers(settings.data_dir, {box.ref.handle, neighbour.ref.handle}).values()))


def used_bytes(box) -> int:
    """On the node."""
    info = os.statvfs(box._layer.upper)
    return (info.f_blocks - info.f_bfree) * info.f_frsize


def test_one_that_is_full_to_the_last_name_and_byte_starts_again(make, tmp_path):
    box = make()
    assert run(box, f'python3 -c "{EXHAUST}"') == (0, "28\n28\n")
    for _ in range(2):
        box.stop()
        assert run(box, "ls n1 && rm n1 && echo x >n1; echo $?")[1].splitlines()[0] == "n1"
    # The kernel's overlay still: Apptainer would take to FUSE if it could not be mounted.
    assert "fuse" not in run(box, "cat /proc/mounts")[1]
    assert not box.download("n1", tmp_path / "n1", limit=100)
    box.destroy()


def test_many_at_once(make, settings):
    with ThreadPoolExecutor(6) as pool:
        boxes = list(pool.map(lambda _: make(), range(6)))
        told = list(pool.map(lambda b: run(b, f"echo {b.ref.handle} >/usr/mine; cat /usr/mine"), boxes))
        assert told == [(0, f"{b.ref.handle}\n") for b in boxes]
        list(pool.map(lambda b: b.destroy(), boxes))
    until(lambda: not any(leftovers(settings.data_dir, {b.ref.handle for b in boxes}).values()))


def test_files_in_memory_that_were_lost_are_not_taken_for_none(runtime, tmp_path):
    spec = RuntimeSpec(image="base", disk_mb=LIMIT_MB, options={"disk": "memory"})
    box = runtime.create(spec, labels={}, proxy=None, timeout=60)
    run(box, "echo x >f")
    holder = int((runtime.boxes / box.ref.handle / "holder").read_text().split()[0])
    os.kill(holder, 9)
    until(lambda: procs.read(holder) is None)
    box.stop()
    for ask, code in (
        (lambda: box.exec("true", timeout=30), "exec_failed"),
        (lambda: box.baseline("/work"), "artifact_failed"),
        (lambda: box.download("f", tmp_path / "f", limit=10), "artifact_failed"),
        (lambda: box.write("f", b""), "upload_failed"),
    ):
        with pytest.raises(InfraError, match="files are gone") as e:
            ask()
        assert e.value.code == code
    box.destroy()


def test_a_file_is_mounted_again(runtime, settings):
    """As after a restart of the node."""
    if why := apptainer_layer.no_files():
        pytest.skip(why)
    spec = RuntimeSpec(image="base", disk_mb=LIMIT_MB, options={"disk": "file"})
    box = runtime.create(spec, labels={}, proxy=None, timeout=60)
    run(box, "echo kept >f")
    box.stop()
    # The kernel lets go of an ended instance's mounts a little after it.
    until(lambda: subprocess.run(["umount", runtime.disks / box.ref.handle]).returncode == 0)
    assert run(box, "cat f") == (0, "kept\n")
    box.destroy()
    assert settings.data_dir not in Path("/proc/self/mountinfo").read_text()


def test_which_is_taken(runtime, monkeypatch):
    def taken(**fields):
        spec = RuntimeSpec(image="base", **fields)
        runtime.check(spec)
        box = runtime.create(spec, labels={}, proxy=None, timeout=60)
        box.destroy()
        return box._record.layer

    monkeypatch.setattr(apptainer_layer, "no_files", lambda: "not root")
    assert taken() == taken(disk_mb=50) == "folder"
    monkeypatch.setenv(DISK_VARIABLE, "memory")
    assert taken(disk_mb=50) == "memory" and taken() == taken(disk_mb=50, user="root") == "folder"
    assert "disk_mb enforced, in memory" in runtime.available()[1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"options": {"disk": "memory"}}, "disk_mb"),
        ({"options": {"disk": "file"}}, "disk_mb"),
        ({"options": {"disk": "memory"}, "disk_mb": 10, "user": "root"}, "root"),
        ({"options": {"disk": "file"}, "disk_mb": 10}, "only a worker that is root"),
    ],
)
def test_refused(runtime, monkeypatch, fields, reason):
    monkeypatch.setattr(apptainer_layer, "no_files", lambda: "only a worker that is root may")
    with pytest.raises(UnsupportedSpec, match=r"runtime\.options\.disk") as e:
        runtime.check(RuntimeSpec(image="base", **fields))
    assert reason in e.value.message


def test_a_node_that_says_something_else(runtime, monkeypatch):
    monkeypatch.setenv(DISK_VARIABLE, "tape")
    with pytest.raises(UnsupportedSpec, match=r"tape.*watched, file, memory"):
        runtime.check(RuntimeSpec(image="base", disk_mb=10))
