"""The folder's own promises: whole objects only, also after a kill; clear errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from polar.errors import PolarError
from polar.objects.folder import FolderStore

WRITER = """
import sys
from pathlib import Path
from polar.objects.folder import FolderStore
store, n = FolderStore(Path(sys.argv[1])), 0
while True:
    size = 1 + n * 7919 % 3_000_000
    (store.put if n % 2 else store.put_if_absent)(f"w{sys.argv[2]}/{n % 5}/{n}", b"%08d" % size + bytes([n % 251]) * size)
    print(n, flush=True)
    n += 1
"""


def test_kill_9_in_the_middle_of_writing_leaves_whole_objects_only(tmp_path):
    told = 0
    for run in range(6):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(run)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3 + run):
            last = int(child.stdout.readline())
        time.sleep(0.003 * run)  # at another point of the next write each time
        os.kill(child.pid, signal.SIGKILL)
        rest, _ = child.communicate()
        told += 1 + max([last, *map(int, rest.split())])
    store = FolderStore(tmp_path)
    keys = list(store.list())
    assert told <= len(keys) <= told + 6, "all that were acknowledged, and at most the one that was being written"
    for k in keys:
        data, n = store.get(k), int(k.rpartition("/")[2])
        assert len(data) == 8 + int(data[:8]) and set(data[8:]) == {n % 251}


def test_an_unusable_folder_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PolarError, match="object folder") as e:
        FolderStore(tmp_path / "file" / "objects")
    assert e.value.code == "store_unavailable"


def test_an_unreadable_object_is_not_a_missing_one(tmp_path):
    store = FolderStore(tmp_path)
    (tmp_path / "k.obj").mkdir()  # reading it fails for everyone, root included
    with pytest.raises(PolarError, match="object 'k'") as e:
        store.get("k")
    assert (e.value.code, e.value.retryable) == ("store_unavailable", True)


def test_a_failing_write_is_a_clear_error_and_leaves_nothing(tmp_path):
    store = FolderStore(tmp_path)
    with pytest.raises(PolarError) as e:
        store.put_file("k", tmp_path / "no such file")
    assert e.value.code == "store_unavailable"
    assert list(store.list()) == [] and list((tmp_path / ".tmp").iterdir()) == []
