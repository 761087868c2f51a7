"""The example of docs/runtimes.md, as it stands there: a back-end of somebody's own, against a service over HTTP."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import msgspec
import pytest
from msgspec import Struct

from polar import changes
from polar.codec import from_json, to_json
from polar.config import Settings
from polar.errors import InfraError, InvalidTask, NotFound, UnsupportedSpec
from polar.sandbox import ExecResult, Runtime, Sandbox, SandboxRef
from polar.task import RuntimeSpec
from runtimes import plugin
from runtimes.local import LocalRuntime
from runtimes.registry import load_runtime
from tests.runtimes.conftest import REPOSITORY

SPEC = RuntimeSpec(network="none")


class Asked(Struct):
    argv: list[str] | str
    timeout: float
    env: dict[str, str]
    cwd: str | None
    stdin: bytes | None


def service(runtime: LocalRuntime) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            url = urlsplit(self.path)
            parts, query = url.path.strip("/").split("/"), dict(parse_qsl(url.query))
            try:
                status, out = 200, self.answer(parts, query, body)
            except NotFound as e:
                status, out = 404, e.message.encode()
            except Exception as e:
                status, out = 500, str(e).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(out)))
            self.end_headers()
            self.wfile.write(out)

        do_GET = do_PUT = do_POST = do_DELETE = serve

        def answer(self, parts: list[str], query: dict[str, str], body: bytes) -> bytes:
            if len(parts) == 1 and self.command == "POST":
                asked = json.loads(body)
                # The far machine has its own ways: here, plain processes.
                spec = RuntimeSpec(env=asked["env"], options={"isolation": "none"})
                box = runtime.create(spec, labels=asked["labels"], proxy=None, timeout=60)
                return to_json(msgspec.structs.replace(box.ref, backend=asked["backend"]))
            if len(parts) == 1:
                refs = runtime.list(json.loads(query["labels"]))
                return to_json([msgspec.structs.replace(r, backend=query["backend"]) for r in refs])
            ref = SandboxRef(backend="local", handle=parts[1], proxy_url="", workdir="")
            box = runtime.attach(ref)
            return getattr(self, f"{self.command}_{'_'.join(parts[2:])}".lower())(box, query, body)

        def post_exec(self, box: Sandbox, query: dict[str, str], body: bytes) -> bytes:
            return to_json(box.exec(**msgspec.structs.asdict(from_json(body, Asked))))

        def put_files(self, box: Sandbox, query: dict[str, str], body: bytes) -> bytes:
            with tempfile.TemporaryDirectory() as folder:
                plugin.unpacked(body, Path(folder, "x"), 1 << 30)
                box.upload(Path(folder, "x"), query["path"])
            return b""

        def get_files(self, box: Sandbox, query: dict[str, str], body: bytes) -> bytes:
            with tempfile.TemporaryDirectory() as folder:
                cut = box.download(query["path"], Path(folder, "x"), limit=int(query["limit"]))
                return to_json((cut, plugin.packed(Path(folder, "x"))))

        def get_baseline(self, box: Sandbox, query: dict[str, str], body: bytes) -> bytes:
            return box.baseline(query["under"])

        def post_changes(self, box: Sandbox, query: dict[str, str], body: bytes) -> bytes:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder, "c.tar")
                cut = box.changes(target, under=query["under"], baseline=body, limit=int(query["limit"]))
                return to_json((cut, target.read_bytes()))

        def post_stop(self, box: Sandbox, *_: Any) -> bytes:
            box.stop()
            return b""

        def delete_(self, box: Sandbox, *_: Any) -> bytes:
            box.destroy()
            return b""

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@pytest.fixture
def remote(tmp_path, monkeypatch) -> Iterator[Runtime]:
    text = (REPOSITORY / "docs/runtimes.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.S)
    (tmp_path / "my_remote_runtime.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    server = ThreadingHTTPServer(("127.0.0.1", 0), service(LocalRuntime(Settings(data_dir=str(tmp_path / "far")))))
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("SANDBOX_SERVICE", f"http://127.0.0.1:{server.server_address[1]}")
    settings = Settings(data_dir=str(tmp_path), runtimes=["my_remote_runtime:RemoteRuntime"])
    yield load_runtime("my_remote_runtime:RemoteRuntime", settings)
    server.shutdown()
    server.server_close()
    sys.modules.pop("my_remote_runtime", None)


def test_the_documented_plugin(remote, tmp_path):
    assert isinstance(remote, Runtime) and remote.available()[0]
    for field, spec in (
        ("network", RuntimeSpec()),
        ("memory_mb", RuntimeSpec(network="none", memory_mb=100)),
        ("options", RuntimeSpec(network="none", options={"x": 1})),
    ):
        with pytest.raises(UnsupportedSpec, match=rf"runtime\.{field}"):
            remote.check(spec)
    box = remote.create(
        RuntimeSpec(network="none", env={"A": "1"}), labels={"polar.attempt": "x"}, proxy=None, timeout=60
    )
    assert isinstance(box, Sandbox)
    r = box.exec("echo $A $B; cat; exit 3", env={"B": "2"}, stdin=b"in", timeout=30)
    assert (r.exit_code, r.output, r.output_bytes) == (3, b"1 2\nin", 6)
    assert load_runtime(box.ref.backend, Settings(data_dir=str(tmp_path))) is not None
    assert box.exec("sleep 60", timeout=0.5).timed_out
    r = box.exec("echo 12345; exit 4", timeout=30, log=tmp_path / "log", output_limit=3, log_limit=2)
    assert (r.exit_code, r.output, r.output_bytes, (tmp_path / "log").read_bytes()) == (4, b"45\n", 6, b"12")
    begun = time.monotonic()
    r = box.exec("sleep 100", timeout=200, cancelled=lambda: time.monotonic() > begun + 1)
    assert (r.exit_code, r.cancelled) == (None, True)
    box.write("deep/f", b"data", mode=0o600)
    assert box.exec("stat -c %a deep/f", timeout=30).output == b"600\n"
    box.upload(REPOSITORY / "compose" / "apptainer", "tree")
    assert not box.download("tree", tmp_path / "out", limit=1 << 20)
    assert (tmp_path / "out" / "install.sh").read_bytes() == (REPOSITORY / "compose/apptainer/install.sh").read_bytes()
    assert box.download("tree", tmp_path / "part", limit=10)  # cut
    with pytest.raises(NotFound):
        box.download("nope", tmp_path / "nope", limit=10)
    baseline = box.baseline(".")
    box.exec("echo more >new; rm deep/f", timeout=30)
    (ref,) = remote.list({"polar.attempt": "x"})
    again = remote.attach(ref)
    again.stop()
    assert not again.changes(tmp_path / "c.tar", under=".", baseline=baseline, limit=1 << 20)
    assert "new" in changes.paths(tmp_path / "c.tar") and changes.removed(tmp_path / "c.tar") == ["deep/f"]
    again.destroy()
    again.destroy()
    assert remote.list({}) == []
    with pytest.raises(InfraError):
        again.exec("true", timeout=5)


def test_a_service_that_is_away(remote, monkeypatch):
    monkeypatch.setenv("SANDBOX_SERVICE", "http://127.0.0.1:1")
    with pytest.raises(InfraError) as e:
        remote.create(SPEC, labels={}, proxy=None, timeout=5)
    assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)


@pytest.mark.parametrize("answer", [b"no json", b"{}", b'{"handle": 1}', b""])
def test_a_service_that_answers_nonsense(remote, monkeypatch, answer):
    box = remote.create(SPEC, labels={}, proxy=None, timeout=60)
    handler = service(LocalRuntime(Settings(data_dir="unused")))
    monkeypatch.setattr(handler, "answer", lambda *_: answer)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    with monkeypatch.context() as patch:
        patch.setenv("SANDBOX_SERVICE", f"http://127.0.0.1:{server.server_address[1]}")
        for ask in (
            lambda: remote.create(SPEC, labels={}, proxy=None, timeout=5),
            lambda: box.exec("true", timeout=5),
            lambda: box.download("x", Path("nowhere"), limit=5),
        ):
            with pytest.raises(InfraError, match="sandbox service"):
                ask()
    server.shutdown()
    server.server_close()
    box.destroy()


def test_what_authors_may_import(tmp_path):
    (tmp_path / "f").write_bytes(b"data")
    (tmp_path / "f").chmod(0o4750)
    for source, mode, expected in (
        (tmp_path / "f", None, 0o750),
        (tmp_path / "f", 0o600, 0o600),
        (b"data", 0o640, 0o640),
    ):
        assert not plugin.unpacked(plugin.packed(source, mode), tmp_path / "out", 4)
        assert (tmp_path / "out").read_bytes() == b"data" and (tmp_path / "out").stat().st_mode & 0o7777 == expected
    assert plugin.unpacked(plugin.packed(b"data"), tmp_path / "out", 3)
    with pytest.raises(InfraError) as e:
        plugin.packed(tmp_path / "nothing")
    assert e.value.code == "upload_failed"
    for archive in (b"", b"no archive", plugin.packed(b"x" * 5000)[:2000]):
        with pytest.raises(InfraError) as e:
            plugin.unpacked(archive, tmp_path / "broken", 10_000)
        assert e.value.code == "artifact_failed"

    def fails() -> ExecResult:
        raise NotFound("gone")

    with pytest.raises(NotFound):
        plugin.run(fails, lambda: None)


def test_a_deployment_must_allow_it(remote, tmp_path):
    with pytest.raises(InvalidTask, match="not allowed in this deployment"):
        load_runtime("my_remote_runtime:RemoteRuntime", Settings(data_dir=str(tmp_path), runtimes=["docker"]))
