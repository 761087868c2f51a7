"""What an S3 store says when it can't: wrong credentials, no bucket, no server."""

from __future__ import annotations

import pytest

from polar.errors import PolarError
from polar.objects import open_objects
from tests.objects.conftest import ACCESS, SECRET, _free_ports


def calls(store, tmp_path):
    (tmp_path / "f").write_bytes(b"x")
    return {
        "put": lambda: store.put("k", b"x"),
        "put_if_absent": lambda: store.put_if_absent("k", b"x"),
        "put_file": lambda: store.put_file("k", tmp_path / "f"),
        "get": lambda: store.get("k"),
        "get_file": lambda: store.get_file("k", tmp_path / "g"),
        "exists": lambda: store.exists("k"),
        "list": lambda: list(store.list()),
        "delete": lambda: store.delete("k"),
    }


@pytest.fixture
def credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return monkeypatch


@pytest.mark.parametrize(("access", "secret"), [(ACCESS, "wrong"), ("wrong", SECRET)])
def test_wrong_credentials(s3_server, credentials, tmp_path, access, secret):
    open_objects(f"s3://polar-test?endpoint={s3_server}&create=1").put("k", b"kept")
    credentials.setenv("AWS_ACCESS_KEY_ID", access)
    credentials.setenv("AWS_SECRET_ACCESS_KEY", secret)
    store = open_objects(f"s3://polar-test?endpoint={s3_server}")
    for name, call in calls(store, tmp_path).items():
        with pytest.raises(PolarError) as e:
            call()
        assert e.value.code == "store_unavailable", name
        assert SECRET not in e.value.message and "object '" in e.value.message, name


def test_no_such_bucket(s3_server, credentials, tmp_path):
    store = open_objects(f"s3://never-made?endpoint={s3_server}")
    with pytest.raises(PolarError) as e:
        store.get("k")
    assert e.value.code in ("store_unavailable", "not_found")


def test_a_server_that_is_down(credentials, tmp_path):
    (port,) = _free_ports(1)
    store = open_objects(f"s3://bucket?endpoint=http://127.0.0.1:{port}")
    for name in ("put_if_absent", "get"):
        with pytest.raises(PolarError) as e:
            calls(store, tmp_path)[name]()
        assert (e.value.code, e.value.retryable) == ("store_unavailable", True), name
