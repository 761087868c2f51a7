"""What a worker holds in `data_dir`: gone when it ends, and when it is killed, once another starts; a living one's stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from polar.config import Settings
from tests.runtimes.conftest import REPOSITORY
from tests.runtimes.killed_worker import leftovers
from workers.context import Context
from workers.scratch import Scratch

HOLDER = """
import sys
from polar.config import Settings
from workers.context import Context
with Context(Settings(data_dir=sys.argv[1]), "a").folder() as folder:
    (folder / "artifact").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
"""


class Worker:
    """A process that holds a file in its scratch folder."""

    def __init__(self, data_dir: Path):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
        self.process = subprocess.Popen([sys.executable, "-c", HOLDER, str(data_dir)], **pipes)  # type: ignore[call-overload]
        self.file = Path(self.process.stdout.readline().strip()) / "artifact"

    def end(self, kill: bool) -> None:
        if kill:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def left(data_dir: Path) -> list[str]:
    return leftovers(str(data_dir), set())["folders"]


def test_a_killed_worker_s_goes_and_a_living_one_s_stays(tmp_path):
    killed, living = Worker(tmp_path), Worker(tmp_path)
    try:
        killed.end(kill=True)
        assert killed.file.exists() and str(killed.file) in left(tmp_path)
        Context(Settings(data_dir=str(tmp_path)), "b")
        assert living.file.exists() and not killed.file.parent.parent.exists()
    finally:
        living.end(kill=False)
    assert living.process.returncode == 0 and left(tmp_path) == []


@pytest.mark.parametrize("rest", [["tmpx/f"], ["x.lock"], ["x.lock", "x/tmpy/f"], ["x/tmpy/f"]])
def test_whatever_a_death_left(tmp_path, rest):
    """At any moment between making the lock and removing it; the first is how older versions kept theirs."""
    for name in rest:
        (path := tmp_path / "scratch" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    Scratch(tmp_path / "scratch")
    assert left(tmp_path) == []


def test_many_that_start_at_once_take_nothing_from_each_other(tmp_path):
    def one(_: int) -> bool:
        with Scratch(tmp_path).folder() as folder:
            (folder / "f").write_text("kept")
            Scratch(tmp_path)
            return (folder / "f").read_text() == "kept"

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(400)))
    assert list(tmp_path.iterdir()) == []


def test_a_process_goes_on_when_its_folder_was_taken_away(tmp_path):
    scratch = Scratch(tmp_path / "scratch")
    with scratch.folder() as first:
        pass
    first.parent.rmdir()
    with scratch.folder() as folder:
        assert folder.is_dir() and folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_can_t_be_cleared_stops_no_worker(tmp_path, caplog, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "no")

    monkeypatch.setattr("workers.scratch._clear", refused)
    with Scratch(tmp_path / "scratch").folder() as folder:
        assert folder.is_dir()
    assert "what killed processes left stays" in caplog.text
