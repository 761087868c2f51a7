"""Prepare steps on a real (plain local) sandbox, and their failures."""

from __future__ import annotations

import os
import tarfile
import time
from pathlib import Path

import pytest

from polar.config import Settings
from polar.errors import InfraError, NotFound
from polar.task import Exec, RuntimeSpec, UploadDir, UploadFile
from runtimes.local import LocalRuntime
from runtimes.prepare import run_prepare


@pytest.fixture
def box(tmp_path):
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path / "data")))
    box = runtime.create(RuntimeSpec(options={"isolation": "none"}), labels={}, proxy=None, timeout=10)
    yield box
    box.destroy()


def prepare(box, *actions, timeout=30.0, fetch=Path, cancelled=None):
    run_prepare(box, list(actions), timeout=timeout, fetch=fetch, cancelled=cancelled)


def cat(box, path):
    return box.exec(["cat", path], timeout=10).output.decode()


def test_all_kinds_in_order(box, tmp_path):
    (tmp_path / "file").write_text("from a file")
    (tmp_path / "tree" / "d").mkdir(parents=True)
    (tmp_path / "tree" / "d" / "f").write_text("from a folder")
    with tarfile.open(tmp_path / "tree.tgz", "w:gz") as tar:
        tar.add(tmp_path / "tree", arcname=".")
    sources = {"object://a/file": "file", "object://tree": "tree.tgz", "/host/tree": "tree"}
    prepare(
        box,
        UploadFile(target="a/content", content="from the täsk", mode=0o600),
        UploadFile(target="a/file", source="object://a/file"),
        UploadDir(source="object://tree", target="packed"),
        UploadDir(source="/host/tree", target="plain"),
        Exec(command="cp content copied; echo $X > x", cwd="a", env={"X": "1"}),
        fetch=lambda source: tmp_path / sources[source],
    )
    assert cat(box, "a/copied") == "from the täsk" and cat(box, "a/file") == "from a file" and cat(box, "a/x") == "1\n"
    assert cat(box, "packed/d/f") == cat(box, "plain/d/f") == "from a folder"
    assert box.exec("stat -c %a a/content", timeout=10).output == b"600\n"


def failed(box, *actions, **kw) -> InfraError:
    with pytest.raises(InfraError) as e:
        prepare(box, *actions, **kw)
    assert (e.value.code, e.value.stage) == ("prepare_failed", "init")
    return e.value


def test_a_failing_command_is_told_in_full(box):
    e = failed(box, Exec(command="true"), Exec(command="for i in 1 2 3 4 5 6 7; do echo line $i; done; exit 9"))
    assert "prepare[1] (exec: for i in" in e.message and "exit code 9" in e.message
    assert "line 3 | line 4 | line 5 | line 6 | line 7" in e.message and "line 2 |" not in e.message
    assert e.retryable


def test_attempts(box):
    step = "echo x >> n; test $(wc -l < n) -ge 3"
    prepare(box, Exec(command=step, max_attempts=3, retry_backoff_seconds=0))
    assert cat(box, "n") == "x\n" * 3
    e = failed(box, Exec(command="echo x >> m; exit 1", max_attempts=2, retry_backoff_seconds=0.01))
    assert "attempt 2 of 2" in e.message and cat(box, "m") == "x\n" * 2


def test_what_a_retry_can_t_help_is_not_retried(box, tmp_path):
    calls = []

    def fetch(source):
        calls.append(source)
        if source == "missing":
            return tmp_path / "missing"
        raise NotFound(f"no object '{source}'")

    for source in ("missing", "object://gone"):
        e = failed(box, UploadFile(target="x", source=source, max_attempts=5, retry_backoff_seconds=0), fetch=fetch)
        assert not e.retryable and "upload_file to x" in e.message and source.removeprefix("object://") in e.message
    assert len(calls) == 2
    e = failed(box, UploadFile(target="/etc/polar-test", content="x", max_attempts=5, retry_backoff_seconds=0))
    assert not e.retryable and not os.path.exists("/etc/polar-test")


def test_a_store_that_is_away_is_asked_again(box, tmp_path):
    (tmp_path / "f").write_text("late")
    answers = [InfraError("the store is away", code="store_unavailable"), OSError("so is the disk"), None]

    def fetch(source):
        if (e := answers.pop(0)) is not None:
            raise e
        return tmp_path / "f"

    prepare(box, UploadFile(target="f", source="object://f", max_attempts=3, retry_backoff_seconds=0), fetch=fetch)
    assert cat(box, "f") == "late"


def test_time(box):
    started = time.monotonic()
    e = failed(box, Exec(command="sleep 60", timeout_seconds=0.3))
    assert "killed after" in e.message
    e = failed(box, Exec(command="exit 1", max_attempts=20, retry_backoff_seconds=600), timeout=5)
    assert "exit code 1" in e.message
    e = failed(box, Exec(command="sleep 60"), Exec(command="true"), timeout=0.3)
    assert "prepare[0]" in e.message
    assert "no time left" in failed(box, Exec(command="true"), timeout=0).message
    assert time.monotonic() - started < 10


def test_cancel(box):
    started = time.monotonic()
    assert "cancelled" in failed(box, Exec(command="sleep 60", max_attempts=9), cancelled=lambda: True).message
    assert time.monotonic() - started < 10


def test_an_archive_with_a_way_out_is_refused(box, tmp_path):
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(tmp_path / "x", arcname="../../x")
    e = failed(box, UploadDir(source="bad", target="t"), fetch=lambda s: tmp_path / "bad.tar")
    assert not e.retryable and "archive" in e.message
    (tmp_path / "no.tar").write_text("no archive")
    assert "prepare[0]" in failed(box, UploadDir(source="no", target="t"), fetch=lambda s: tmp_path / "no.tar").message
