"""A Docker engine of our own that stops, or is killed, while sandboxes are made, used and removed, and comes back."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from polar.config import Settings
from polar.errors import InfraError
from polar.task import RuntimeSpec
from runtimes.docker import DockerRuntime
from tests.runtimes import engines
from tests.runtimes.conftest import IMAGE, docker_missing, running, unique, until

pytestmark = [pytest.mark.docker, pytest.mark.slow, pytest.mark.timeout(400)]
LIVES = 4  # at once
CODES = {"runtime_create_failed", "exec_failed", "upload_failed", "artifact_failed"}


class Load:
    """Lives of sandboxes, one after another in each of some threads, until it is told to stop."""

    def __init__(self, runtime: DockerRuntime, labels: dict[str, str], word: str, folder: Path):
        self._runtime, self._labels, self._word, self._folder = runtime, labels, word, folder
        self.done = [0] * LIVES
        self.errors: list[InfraError] = []
        self.unexpected: list[Exception] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._lives, args=(n,)) for n in range(LIVES)]
        for t in self._threads:
            t.start()

    def _lives(self, n: int) -> None:
        while not self._over.is_set():
            try:
                self._life(n)
                self.done[n] += 1
            except InfraError as e:
                self.errors.append(e)
                self._over.wait(0.1)
            except Exception as e:
                self.unexpected.append(e)

    def _life(self, n: int) -> None:
        box = self._runtime.create(RuntimeSpec(image=IMAGE), labels=self._labels, proxy=None, timeout=60)
        box.write("f", b"data")
        assert box.exec(f"setsid sleep {self._word} & cat f", timeout=60).output == b"data"
        assert box.exec("sleep 30", timeout=0.3).timed_out
        assert box.download("f", self._folder / str(n), limit=100) is False
        box.destroy()

    def end(self) -> None:
        self._over.set()
        for t in self._threads:
            t.join(120)
            assert not t.is_alive()


def test_an_engine_restarts_under_load(monkeypatch, tmp_path):
    if why := docker_missing():
        pytest.skip(f"the image comes from this machine's engine: {why}")
    labels, word = {"polar.test": unique()}, unique()
    with engines.daemon() as daemon:
        engines.give_image(daemon.api)
        monkeypatch.setenv("DOCKER_HOST", daemon.url)
        runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
        kept = runtime.create(RuntimeSpec(image=IMAGE), labels=labels, proxy=None, timeout=60)
        kept.write("kept", b"kept")
        load = Load(runtime, labels, word, tmp_path)
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                before = list(load.done)
                until(lambda: all(a > b for a, b in zip(load.done, before, strict=True)), 120)  # noqa: B023
                seen = len(load.errors)
                daemon.end(number)
                until(lambda: len(load.errors) >= seen + LIVES, 60)  # noqa: B023  (while it is away)
                with pytest.raises(InfraError) as e:
                    runtime.list(labels)
                assert e.value.retryable
                daemon.start()
            before = list(load.done)
            until(lambda: all(a > b for a, b in zip(load.done, before, strict=True)), 120)
        finally:
            load.end()
        assert load.unexpected == []
        assert {e.code for e in load.errors} <= CODES and all(e.retryable for e in load.errors), load.errors
        assert kept.exec("cat kept", timeout=60).output == b"kept"
        # Lives that were cut off left sandboxes. They are found, and go with all that ran in them.
        for ref in runtime.list(labels):
            runtime.attach(ref).destroy()
        assert runtime.list(labels) == [] and running(word) == 0
