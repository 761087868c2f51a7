"""What every runtime promises of files."""

from __future__ import annotations

import os

import pytest

from polar.errors import InfraError, NotFound


def test_upload_and_download(box, tmp_path):
    src = tmp_path / "src"
    (src / "deep" / "er").mkdir(parents=True)
    (src / "deep" / "er" / "x.bin").write_bytes(bytes(range(256)) * 100)
    (src / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (src / "run.sh").chmod(0o755)
    (src / "link").symlink_to("deep/er/x.bin")
    box.upload(src, "up/tree")
    assert box.exec("up/tree/run.sh; wc -c < up/tree/link", timeout=30).output.split() == [b"ran", b"25600"]
    box.upload(src / "run.sh", f"{box.ref.workdir}/up/one/file", mode=0o600)
    assert box.exec("stat -c %a up/one/file", timeout=30).output == b"600\n"
    box.upload(src, "up/tree")  # again, into what is there
    assert box.download("up", tmp_path / "out", limit=1 << 20) is False
    out = tmp_path / "out"
    assert (out / "tree/deep/er/x.bin").read_bytes() == (src / "deep/er/x.bin").read_bytes()
    assert os.readlink(out / "tree/link") == "deep/er/x.bin" and os.access(out / "tree/run.sh", os.X_OK)
    assert (out / "one/file").read_bytes() == (src / "run.sh").read_bytes()


def test_write(box):
    box.write("w/a b/ü.txt", b"\x00data", mode=0o640)
    box.write("w/a b/ü.txt", b"\x00other", mode=0o640)
    assert box.exec("stat -c %a w/*/ü.txt; cat w/*/ü.txt", timeout=30).output == b"640\n\x00other"
    box.write("~/.conf/x", b"at home")
    assert box.exec("cat ~/.conf/x", timeout=30).output == b"at home"


def test_download_of_what_is_not_there(box, tmp_path):
    for path in ("nope", "no/pe", f"{box.ref.workdir}/nope", "dangling"):
        box.exec("ln -sf /no/such dangling", timeout=30)
        with pytest.raises(NotFound):
            box.download(path, tmp_path / "x", limit=10)
    assert not (tmp_path / "x").exists()


def test_download_is_bounded(box, tmp_path):
    box.exec(
        "mkdir -p big/d; head -c 5000 /dev/zero > big/f; truncate -s 1T big/d/sparse; "
        "for i in 1 2 3 4; do head -c 4000 /dev/zero > big/d/$i; done",
        timeout=30,
    )
    assert box.download("big/f", tmp_path / "f", limit=1000) is True
    assert (tmp_path / "f").stat().st_size == 1000
    assert box.download("big/f", tmp_path / "g", limit=5000) is False
    assert box.download("big", tmp_path / "t", limit=10_000) is True
    assert sum(p.stat().st_size for p in (tmp_path / "t").rglob("*") if p.is_file()) <= 10_000


def test_download_follows_no_link_out(backend, box, tmp_path):
    secret = tmp_path / "host-secret"
    secret.write_text("the host's")
    box.exec(
        f"mkdir -p trick/in; cd trick; echo own > in/own; ln -s {secret} a; ln -s / b; ln -s ../../../../../..{secret} c; "
        "ln -s in d; ln -s d/../../../x e; ln in/own hard; mkfifo pipe",
        timeout=30,
    )
    out = tmp_path / "out"
    assert box.download("trick", out, limit=1 << 20) in (False, True)
    kept = {p.name for p in out.rglob("*")}
    assert kept == {"in", "own", "d", "hard"}
    assert (out / "hard").read_text() == (out / "d" / "own").read_text() == "own\n"
    for path in ("trick/a", f"trick/b{secret}", "trick/c"):
        with pytest.raises(NotFound):
            box.download(path, tmp_path / "x", limit=100)
    box.exec("ln -s in/own trick/f; ln -s trick/in/own ./g", timeout=30)
    for path in ("trick/f", "g"):
        assert box.download(path, tmp_path / f"y-{path[-1]}", limit=100) is False
        assert (tmp_path / f"y-{path[-1]}").read_text() == "own\n"


def test_upload_follows_no_link_out(backend, box, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (tmp_path / "f").write_text("x")
    box.exec(f"ln -sfn {outside} door; ln -sfn {outside}/file filedoor", timeout=30)
    for target in ("door/a", "filedoor", "door/deep/er/b"):
        try:
            box.write(target, b"x")
            box.upload(tmp_path / "f", target)
        except InfraError as e:
            assert e.code == "upload_failed"
    assert list(outside.iterdir()) == []
