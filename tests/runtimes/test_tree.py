"""Copying hostile trees: nothing leaves the target, nothing exceeds the limit."""

from __future__ import annotations

import errno
import io
import os
import tarfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import Conflict
from runtimes import tree
from runtimes.inroot import Escape, Root

NAMES = st.sampled_from(["a", "b", "c", "..", ".", "", "a/b", "ü"])
LINKS = st.lists(st.sampled_from(["a", "b", "..", ".", "", "/"]), min_size=1, max_size=6).map("/".join)


@st.composite
def members(draw) -> list[tarfile.TarInfo]:
    out = []
    for _ in range(draw(st.integers(1, 12))):
        info = tarfile.TarInfo("/".join(["top", *draw(st.lists(NAMES, max_size=4))]))
        info.type = draw(
            st.sampled_from(
                [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
            )
        )
        info.mode = draw(st.integers(0, 0o7777))
        if info.isreg():
            info.size = draw(st.integers(0, 40))
        if info.issym():
            info.linkname = draw(LINKS)
        if info.islnk():
            info.linkname = "/".join(["top", *draw(st.lists(NAMES, max_size=4))])
        out.append(info)
    return out


def archive(infos: list[tarfile.TarInfo]) -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for info in infos:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    data.seek(0)
    return data


@given(members(), st.integers(0, 100), st.booleans())
def test_nothing_points_or_lands_outside(tmp_path_factory, infos, limit, streamed):
    base = tmp_path_factory.mktemp("t")
    (base / "secret").write_text("s")
    target = base / "in" / "target"
    data = archive(infos)
    if streamed:
        with tarfile.open(fileobj=data, mode="r|") as tar:
            tree.write_tree(tree.from_tar(tar), target, limit)
    else:
        path = base / "x.tar"
        path.write_bytes(data.getvalue())
        tree.unpack(path, target, limit)
        path.unlink()
    assert sorted(p.name for p in base.iterdir()) in (["in", "secret"], ["secret"])
    assert (base / "secret").read_text() == "s"
    if (base / "in").is_dir():
        assert [p.name for p in (base / "in").iterdir()] in (["target"], [])
    total = 0
    for folder, dirs, files in os.walk(target):
        for name in dirs + files:
            path = Path(folder, name)
            try:
                os.stat(path)
            except OSError as e:
                if e.errno == errno.ELOOP:
                    continue
            real = path.resolve()
            assert real.is_relative_to(target.resolve()), (path, os.readlink(path))
            if path.is_file() and not path.is_symlink():
                total += path.stat().st_size
                assert path.stat().st_mode & 0o7000 == 0
    assert total <= limit


@given(st.lists(st.sampled_from(["d1", "d2", "link"]), max_size=3).map(tuple), LINKS)
def test_a_kept_link_has_its_ups_first(path, target):
    if tree.stays_inside((*path, "name"), target):
        parts = [p for p in target.split("/") if p not in ("", ".")]
        assert not target.startswith("/")
        ups = parts.count("..")
        assert parts[:ups] == [".."] * ups and ups <= len(path)


def test_two_innocent_links_that_lead_out_together(tmp_path):
    """`d` goes up to the top legally; through it, `e` would leave."""
    infos = []
    for name, link in (("top/a/b/d", "../.."), ("top/e", "a/b/d/../secret"), ("top/f", "a/b/d/x")):
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, link
        infos.append(info)
    with tarfile.open(fileobj=archive(infos), mode="r|") as tar:
        tree.write_tree(tree.from_tar(tar), tmp_path / "t", 100)
    assert (tmp_path / "t/a/b/d").is_symlink() and (tmp_path / "t/f").is_symlink()
    assert not os.path.lexists(tmp_path / "t/e")


def test_a_link_below_a_link_is_not_made(tmp_path):
    infos = []
    for name, link in (("top/a/b/d", "../.."), ("top/a/b/d/x", "../../../secret")):
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, link
        infos.append(info)
    with tarfile.open(fileobj=archive(infos), mode="r|") as tar:
        assert tree.write_tree(tree.from_tar(tar), tmp_path / "t", 100) is True
    assert not os.path.lexists(tmp_path / "t/x")


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "out").mkdir()
    link, file = tarfile.TarInfo("top/door"), tarfile.TarInfo("top/door/file")
    link.type, link.linkname = tarfile.SYMTYPE, "../out"
    file.size = 3
    with tarfile.open(fileobj=archive([link, file]), mode="r|") as tar:
        tree.write_tree(tree.from_tar(tar), tmp_path / "t", 100)
    assert list((tmp_path / "out").iterdir()) == []
    assert (tmp_path / "t/door/file").read_bytes() == b"xxx"


def test_the_target_must_be_free(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(Conflict):
        tree.write_tree(iter([tree.Entry((), "folder")]), tmp_path / "full", 1)
    (tmp_path / "link").symlink_to(tmp_path / "full")
    tree.write_tree(iter([tree.Entry((), "file", 0o644, io.BytesIO(b"abc"))]), tmp_path / "link", 10)
    assert (tmp_path / "link").read_bytes() == b"abc" and not (tmp_path / "link").is_symlink()


def test_too_deep_and_too_many_are_cut(tmp_path, monkeypatch):
    deep = tmp_path / "src"
    deep.joinpath(*["d"] * (tree.MAX_DEPTH + 5)).mkdir(parents=True)
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert tree.write_tree(tree.walk(fd, "src"), tmp_path / "out", 1000) is True
        monkeypatch.setattr(tree, "MAX_ENTRIES", 3)
        assert tree.write_tree(tree.walk(fd, "src"), tmp_path / "few", 1000) is True
        assert len(list((tmp_path / "few").rglob("*"))) == 2
    finally:
        os.close(fd)


def test_remove_a_chain_too_deep_for_any_path(tmp_path):
    top = tmp_path / "top"
    top.mkdir()
    here = os.open(top, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    tree.remove(top)
    assert not top.exists()


def held(do) -> int:
    """The most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        do()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", ["files", "folders", "below"])
def test_remove_holds_no_list_of_what_it_removes(tmp_path, kind):
    top = tmp_path / "top"
    inner = top / "in" if kind == "below" else top
    inner.mkdir(parents=True)
    for n in range(20_000):
        at = f"{inner}/{n}"
        os.close(os.open(at, os.O_CREAT)) if kind == "files" else os.mkdir(at)
    assert held(lambda: tree.remove(top)) < 1 << 20
    assert not top.exists()


def test_two_removals_at_once(tmp_path):
    for n in range(20):
        top = tmp_path / str(n)
        for i in range(30):
            (top / f"{i % 5}" / f"d{i}" / "x" / "y").mkdir(parents=True)
            (top / f"{i % 5}" / f"d{i}" / "f").touch()
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(tree.remove, [top] * 4)) == [None] * 4
        assert not top.exists()


def test_what_comes_back_is_told(tmp_path, monkeypatch):
    """As on a network's file system, where an open file stays under another name."""
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "f").touch()
    monkeypatch.setattr(tree.os, "unlink", lambda path: os.rename(path, f"{path}x"))
    with pytest.raises(OSError, match="stays"):
        tree.remove(tmp_path / "top")


def test_an_archive_s_members_are_not_held(tmp_path):
    data = archive([tarfile.TarInfo(f"top/{n:05}") for n in range(20_000)])
    path = tmp_path / "x.tar"
    path.write_bytes(data.getvalue())

    def read() -> None:
        with tarfile.open(path) as tar:
            assert sum(1 for _ in tree.from_tar(tar)) == 20_000

    assert held(read) < 1 << 20


def test_nothing_is_cut_off_silently(tmp_path):
    """What is neither a file nor a folder leaves nothing there."""
    os.mkfifo(tmp_path / "pipe")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        assert tree.write_tree(tree.walk(fd, "pipe"), tmp_path / "out", 10) is True
    finally:
        os.close(fd)
    assert not (tmp_path / "out").exists()


def test_a_host_without_room_is_no_cut(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(tree, "_copy", full)
    with pytest.raises(OSError, match="no space"):
        tree.write_tree(iter([tree.Entry((), "file", 0o644, io.BytesIO(b"abc"))]), tmp_path / "out", 10)


# -- resolving paths inside


@pytest.fixture
def root(tmp_path) -> Root:
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "secret").write_text("s")
    fs = tmp_path / "fs"
    (fs / "work" / "sub").mkdir(parents=True)
    (fs / "work" / "abs").symlink_to("/work/sub")
    (fs / "work" / "up").symlink_to("../../../../host")
    (fs / "work" / "out").symlink_to(tmp_path / "host")
    (fs / "work" / "loop").symlink_to("loop")
    return Root(fs)


def read(root: Root, path: str) -> bytes:
    with root.locate(path) as (fd, name), open(os.open(name, os.O_RDONLY, dir_fd=fd), "rb") as f:
        return f.read()


def test_links_are_taken_as_the_sandbox_means_them(root):
    root.write("/work/abs/f", io.BytesIO(b"1"), 0o644)
    assert (root.folder / "work/sub/f").read_bytes() == b"1"
    root.write("/../../work/x", io.BytesIO(b"2"), 0o600)
    assert (root.folder / "work/x").read_bytes() == b"2"
    for path in ("/work/up/secret", "/work/out/secret", "/work/loop", "/work/loop/x"):
        with pytest.raises(OSError):
            read(root, path)
    assert (root.folder.parent / "host" / "secret").read_text() == "s"


def test_host_paths_must_stay_inside(root, tmp_path):
    plain = Root(root.folder, as_host=True)
    plain.write(f"{root.folder}/work/y", io.BytesIO(b"3"), 0o644)
    assert (root.folder / "work/y").read_bytes() == b"3"
    for path in (f"{tmp_path}/host/secret", f"{root.folder}/work/out/secret", "/etc/passwd", f"{root.folder}x/y"):
        with pytest.raises(Escape):
            read(plain, path)


@given(st.lists(st.sampled_from(["work", "sub", "abs", "up", "out", "..", "loop", "new", "f"]), max_size=6))
def test_no_path_leads_out(tmp_path_factory, parts):
    base = tmp_path_factory.mktemp("r")
    (base / "host").mkdir()
    fs = base / "fs"
    (fs / "work" / "sub").mkdir(parents=True)
    (fs / "work" / "up").symlink_to("../../host")
    (fs / "work" / "out").symlink_to(base / "host")
    try:
        Root(fs).write("/" + "/".join(parts), io.BytesIO(b"x"), 0o644)
    except OSError:
        pass
    assert list((base / "host").iterdir()) == [] and {p.name for p in base.iterdir()} == {"host", "fs"}
