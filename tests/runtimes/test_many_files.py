"""More files than are told of: the changes end there, and say so."""

from __future__ import annotations

import os

import pytest

from polar import changes
from runtimes import docker_changes, local_changes, overlay_upper
from runtimes.apptainer_changes import write
from runtimes.disk import usage
from runtimes.docker_engine import Engine
from tests.runtimes.conftest import docker_missing

FEW = 50


@pytest.fixture
def few(monkeypatch):
    for module in (changes, local_changes, overlay_upper):
        monkeypatch.setattr(module, "MAX_ENTRIES", FEW)
    monkeypatch.setattr(docker_changes, "LIST_LIMIT", FEW * 40)


@pytest.mark.parametrize("count", [FEW - 20, 10 * FEW])
def test_changes_end_where_there_are_too_many(few, make, tmp_path, count):
    box = make()
    assert box.exec("mkdir repo; touch repo/a repo/b", timeout=60).exit_code == 0
    baseline = box.baseline("repo")
    assert box.exec(f"cd repo; rm a; for i in $(seq {count}); do : >$i; done", timeout=60).exit_code == 0
    box.stop()
    cut = box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 20)
    assert cut is (count > FEW)
    told, gone = changes.paths(tmp_path / "c.tar"), changes.removed(tmp_path / "c.tar")
    assert len(told) < FEW and "b" not in gone
    assert gone == ([] if cut else ["a"])


def test_a_huge_folder_is_not_held(few, tmp_path, monkeypatch):
    """Of Apptainer's upper folder and a local sandbox's: no more names than are told of."""
    monkeypatch.setattr(overlay_upper.os, "listdir", None)
    (tmp_path / "upper" / "w").mkdir(parents=True)
    (tmp_path / "lower").mkdir()
    for n in range(10 * FEW):
        (tmp_path / "upper" / "w" / str(n)).touch()
    most, real = [], overlay_upper.Differing.add
    monkeypatch.setattr(
        overlay_upper.Differing,
        "add",
        lambda d, path, gone: (most.append(len(d.own) + len(d.gone)), real(d, path, gone))[1],
    )
    assert write(tmp_path / "upper", tmp_path / "lower", "/w", set(), tmp_path / "c.tar", 1 << 20)
    assert max(most) == FEW and len(most) == FEW + 1


def test_all_that_a_folder_replaced_is_not_held(few, tmp_path):
    for n in range(10 * FEW):
        (tmp_path / "lower" / "w" / str(n)).mkdir(parents=True)
    (tmp_path / "upper" / "w").mkdir(parents=True)
    os.setxattr(tmp_path / "upper" / "w", "user.overlay.opaque", b"y")
    assert write(tmp_path / "upper", tmp_path / "lower", "/w", set(), tmp_path / "c.tar", 1 << 20)
    assert len(changes.removed(tmp_path / "c.tar")) == FEW


@pytest.mark.docker
def test_an_engine_s_list_is_cut_where_no_name_can_break_it(few, make, backend, monkeypatch):
    if backend.id != "docker":
        pytest.skip("of the engine's list")
    assert not docker_missing()
    box = make()
    name = "},{"
    script = """mkdir repo; cd repo; for i in $(seq 200); do : >"$i"'},{"'; done"""
    assert box.exec(script, timeout=60).exit_code == 0
    for limit in (200, 1003, 1011, 2000):
        monkeypatch.setattr(docker_changes, "LIST_LIMIT", limit)
        found = docker_changes.difference(Engine(), box.ref.handle, box.ref.workdir)
        assert found.cut and all(n == "repo" or n.endswith(name + '"') for n in found.added)
    assert len(found.added) > 10


def test_an_archive_whose_list_of_removals_didnt_fit(tmp_path):
    with changes.Writer(tmp_path / "c.tar", 1000) as out:
        out.removed(f"{n:0100}" for n in range(100))
        assert out.truncated
    assert changes.removed(tmp_path / "c.tar") == [] and changes.paths(tmp_path / "c.tar") == []


def test_hard_links_count_once_and_need_no_memory(tmp_path):
    (tmp_path / "f").write_bytes(b"x" * (1 << 20))
    alone = usage(tmp_path)
    for n in range(100):
        os.link(tmp_path / "f", tmp_path / str(n))
    assert 1 << 20 <= alone <= usage(tmp_path) + 101 and usage(tmp_path) <= alone + (1 << 14)


def test_a_disk_of_folders_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr("runtimes.disk.MAX_FOLDERS", FEW)
    for n in range(FEW):
        (tmp_path / str(n)).mkdir()
    assert usage(tmp_path, 1 << 30) < 1 << 30
    (tmp_path / "one").mkdir()
    assert usage(tmp_path, 1 << 30) > 1 << 30
