"""Attacks on Apptainer sandboxes that were once possible."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from polar.errors import InfraError
from runtimes import cgroups, procs, tree
from runtimes.apptainer_layer import _MARK, Memory


def test_a_process_with_the_old_holders_number_is_not_the_holder(tmp_path):
    """An agent may know its sandbox's name, and what it lets the worker read as its files is anything then."""
    layer = Memory(tmp_path, "sandbox-x", tmp_path, 1 << 20)
    with subprocess.Popen(["sleep", "60"], env={_MARK: "sandbox-x", "PATH": os.defpath}) as forged:
        try:
            found = procs.read(forged.pid)
            assert found is not None
            for text in (f"{found.pid}", f"{found.pid}\n", f"{found.pid} {found.start - 1}"):
                layer._pid.write_text(text)
                with pytest.raises(InfraError, match="gone"):
                    layer.open()
            layer._pid.write_text(f"{found.pid} {found.start}")
            layer.open()
        finally:
            forged.kill()


@pytest.mark.parametrize("backend", ["apptainer"], indirect=True)
def test_a_call_that_waits_for_a_removal_makes_nothing_anew(backend, monkeypatch):
    """The group and the lock's file among them."""
    box = backend.create()
    box.stop()
    handle, place = box.ref.handle, backend.runtime
    waiting, real, found = threading.Event(), place.locked, []

    @contextlib.contextmanager
    def locked(name: str) -> Iterator[None]:
        if threading.current_thread() is late:
            waiting.set()
        with real(name):
            yield

    def call() -> None:
        with pytest.raises(InfraError, match="is gone") as e:
            box.exec("true", timeout=30)
        found.append(e)

    late = threading.Thread(target=call)
    monkeypatch.setattr(place, "locked", locked)
    remove = tree.remove

    def removed(path) -> None:
        late.start()
        assert waiting.wait(30)
        remove(path)

    with monkeypatch.context() as m:
        m.setattr(tree, "remove", removed)
        place.attach(box.ref).destroy()
    late.join()
    assert found and not [p for p in place.records.iterdir() if handle in p.name]
    groups = cgroups.find()
    assert isinstance(groups, str) or handle not in groups.names()
