"""What every object store promises, checked on each back-end."""

from __future__ import annotations

import hashlib
import os
import threading

import pytest

from polar.errors import InvalidConfig, NotFound, PolarError
from polar.objects import open_objects

ODD_KEYS = [
    "a b/c d",
    "ünïcödé/日本語/😀",
    "per%cent/100%25/%2F",
    ".hidden/.dots",
    "..a/a..",
    "plus+and&and=and?and#and;x",
    "quote'\"q/$x(y)*[z]{w}|^`!",  # no backslash: SeaweedFS takes it for a slash
    "UPPER/upper",
    "upper/UPPER",
    "x" * 200,
    "tilde~/@at,comma",
    "a.obj/a.obj",
    ".tmp/x",
]


def test_put_get_overwrite_delete(objects):
    assert not objects.exists("k") and list(objects.list()) == []
    objects.put("k", b"one")
    assert objects.get("k") == b"one" and objects.exists("k")
    objects.put("k", b"two, longer")
    assert objects.get("k") == b"two, longer"
    objects.put("empty", b"")
    assert objects.get("empty") == b"" and objects.exists("empty")
    objects.delete("k")
    objects.delete("k")
    objects.delete("never/was")
    assert not objects.exists("k") and list(objects.list()) == ["empty"]


def test_not_found(objects, tmp_path):
    objects.put("a/b", b"")
    for key in ("nope", "a", "a/b/c", "a/c"):
        assert not objects.exists(key)
        with pytest.raises(NotFound, match=key):
            objects.get(key)
        with pytest.raises(NotFound, match=key):
            objects.get_file(key, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_put_if_absent(objects):
    assert objects.put_if_absent("deep/er/k", b"one")
    assert not objects.put_if_absent("deep/er/k", b"two")
    assert objects.get("deep/er/k") == b"one"
    objects.delete("deep/er/k")
    assert objects.put_if_absent("deep/er/k", b"three")
    objects.put("plain", b"x")
    assert not objects.put_if_absent("plain", b"y")


@pytest.mark.parametrize("round_", range(3))
def test_of_32_writers_one_wins(objects, round_):
    wins, errors = [], []
    gate = threading.Barrier(32)

    def write(n: int) -> None:
        gate.wait()
        try:
            if objects.put_if_absent(f"race/{round_}", b"%d" % n * 1000):
                wins.append(n)
        except PolarError as e:
            errors.append(e.message)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(32)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(wins) == 1 and errors == []
    assert objects.get(f"race/{round_}") == b"%d" % wins[0] * 1000


@pytest.mark.parametrize("order", [("a", "a/b", "a/b/c"), ("a/b/c", "a/b", "a")])
def test_a_key_may_be_another_ones_folder(objects, order):
    for key in order:
        objects.put(key, key.encode())
    assert list(objects.list()) == ["a", "a/b", "a/b/c"]
    assert all(objects.get(k) == k.encode() for k in order)
    objects.delete("a")
    assert list(objects.list()) == ["a/b", "a/b/c"] and objects.get("a/b/c") == b"a/b/c"


def test_list_is_by_prefix_and_in_order(objects):
    keys = ["b/2", "b/10", "b/1", "a", "b", "bc/x", "b.x", "b-x", "c/d/e"]
    for k in keys:
        objects.put(k, b"")
    assert list(objects.list()) == sorted(keys)
    assert list(objects.list("b/")) == ["b/1", "b/10", "b/2"]
    assert list(objects.list("b")) == ["b", "b-x", "b.x", "b/1", "b/10", "b/2", "bc/x"]
    assert list(objects.list("b/1")) == ["b/1", "b/10"]
    assert list(objects.list("c/d/")) == ["c/d/e"]
    assert list(objects.list("nothing/here")) == list(objects.list("zzz")) == []


def test_odd_keys(objects):
    for k in ODD_KEYS:
        objects.put(k, k.encode())
    assert list(objects.list()) == sorted(ODD_KEYS)
    for k in ODD_KEYS:
        assert objects.get(k) == k.encode()
        assert list(objects.list(k)) == [k]
        assert not objects.put_if_absent(k, b"")
    for k in ODD_KEYS:
        objects.delete(k)
    assert list(objects.list()) == []


@pytest.mark.parametrize("key", ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a/./b", "a\x00b"])
def test_keys_that_are_no_keys(objects, key, tmp_path):
    for call in (
        lambda: objects.put(key, b""),
        lambda: objects.put_if_absent(key, b""),
        lambda: objects.get(key),
        lambda: objects.exists(key),
        lambda: objects.delete(key),
        lambda: objects.get_file(key, tmp_path / "f"),
    ):
        with pytest.raises(PolarError) as e:
            call()
        assert e.value.code == "invalid_key"


def test_large_files(objects, tmp_path):
    source, back = tmp_path / "source", tmp_path / "back"
    source.write_bytes(os.urandom(20 << 20))
    objects.put_file("large/one", source)
    objects.get_file("large/one", back)
    assert hashlib.sha256(back.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()
    source.write_bytes(b"short now")
    objects.put_file("large/one", source)
    assert objects.get("large/one") == b"short now"


def test_concurrent_writers_of_different_keys(objects):
    def write(n: int) -> None:
        for i in range(10):
            objects.put(f"many/{n % 4}/{n}-{i}", b"%d" % i)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(list(objects.list("many/"))) == 80


def test_a_second_store_sees_the_same(objects, objects_url):
    objects.put("k", b"v")
    assert open_objects(objects_url).get("k") == b"v"


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x",
        "file://relative/path",
        "s3://",
        "s3://bucket?endpoint=nonsense",
        "s3://bucket?colour=blue",
        "s3://B_",
        "s3://b",
        "x",
    ],
)
def test_wrong_urls_are_refused(url):
    with pytest.raises(InvalidConfig, match="objects URL"):
        open_objects(url)
