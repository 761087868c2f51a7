"""The machine's Docker engine reached from afar: through an SSH server, and through TLS with certificates on both sides."""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from polar import changes
from polar.config import Settings
from polar.errors import InfraError, InvalidConfig, NotFound
from polar.sandbox import ProxyEndpoint
from polar.task import RuntimeSpec
from runtimes import docker_bridge, docker_ssh
from runtimes.docker import DockerRuntime
from tests.runtimes import engines
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image, running, unique, until
from tests.runtimes.test_conformance.common import RUNAWAYS, get

pytestmark = pytest.mark.docker


@pytest.fixture(scope="module")
def image() -> None:
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()


@pytest.fixture
def ssh(image: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with engines.over_ssh() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        yield environment["DOCKER_HOST"]


class _Tls(socketserver.ThreadingTCPServer):
    daemon_threads = True
    context: ssl.SSLContext

    def get_request(self):
        plain, address = super().get_request()
        return self.context.wrap_socket(plain, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, *_):  # a client without a certificate
        pass


@pytest.fixture
def tls(image: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    with _Tls(("127.0.0.1", 0), engines.Tunnel) as server:
        server.context = engines.certificates(tmp_path)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        url = f"tcp://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("DOCKER_HOST", url)
        monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
        monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/etc/ssl/certs/ca-certificates.crt")
        yield url
        server.shutdown()


def life(proxy: ProxyEndpoint, folder: Path) -> None:
    """Everything that a sandbox can do, once."""
    runtime, labels, word = DockerRuntime(Settings(data_dir=str(folder))), {"polar.test": unique()}, unique()
    box = runtime.create(RuntimeSpec(image=IMAGE, env={"A": "b"}), labels=labels, proxy=proxy, timeout=60)
    try:
        assert box.ref.state["bridge"] == docker_bridge.RELAY and get(box) == "proxy saw /x"
        assert runtime.list(labels) == [box.ref]
        baseline = box.baseline(".")
        data = os.urandom(300_000)
        r = box.exec("sha256sum; wc -c; echo $A >&2; exit 4", stdin=data, timeout=60)
        assert r.exit_code == 4 and r.output.split()[2:] == [b"0", b"b"]
        (folder / "data").write_bytes(data)
        box.upload(folder / "data", "in/data", mode=0o600)
        assert box.exec("sha256sum <in/data", timeout=60).output.split()[0] == r.output.split()[0]
        assert box.download("in", folder / "out", limit=1 << 20) is False
        assert (folder / "out" / "data").read_bytes() == data
        with pytest.raises(NotFound):
            box.download("nowhere", folder / "x", limit=1)
        assert box.exec("head -c 3000000 /dev/zero", timeout=60).output_bytes == 3_000_000
        assert box.exec("exec 0<&-; echo deaf", stdin=data, timeout=60).output == b"deaf\n"
        assert box.exec(RUNAWAYS.format(word), timeout=60, cancelled=lambda: running(word) >= 5).cancelled
        assert running(word) == 0
        assert box.changes(folder / "c.tar", under=".", baseline=baseline, limit=1 << 20) is False
        assert "in/data" in changes.paths(folder / "c.tar")
        box.stop()
        assert box.exec("cat in/data | wc -c", timeout=60).output == b"300000\n"  # it starts anew, with its files
        threads = [threading.Thread(target=box.exec, args=("sleep 0.1",), kwargs={"timeout": 60}) for _ in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        box.destroy()
    assert runtime.list(labels) == []


def test_a_life_over_ssh(ssh, proxy, tmp_path):
    life(proxy.endpoint, tmp_path)


def test_a_life_over_tls(tls, proxy, tmp_path):
    life(proxy.endpoint, tmp_path)


def test_certificates_of_others(tls, tmp_path):
    assert DockerRuntime(Settings(data_dir=str(tmp_path))).available()[0]
    other = tmp_path / "other"
    other.mkdir()
    engines.certificates(other)
    for name in ("cert.pem", "key.pem"):
        (tmp_path / name).write_bytes((other / name).read_bytes())
    ok, text = DockerRuntime(Settings(data_dir=str(tmp_path))).available()
    assert not ok and "can't be reached" in text
    (tmp_path / "ca.pem").write_bytes((other / "ca.pem").read_bytes())
    ok, text = DockerRuntime(Settings(data_dir=str(tmp_path))).available()
    assert not ok and "CERTIFICATE_VERIFY_FAILED" in text


def ssh_programs() -> list[int]:
    """Of this process, that run."""
    argv = ["ps", "-ww", "-o", "pid=,args=", "--ppid", str(os.getpid())]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return [int(line.split()[0]) for line in out.splitlines() if "dial-stdio" in line]


def test_ssh_connections_end(ssh, tmp_path):
    """A command's ends with the command, also when that is cut off. Those that wait for a next call may die meanwhile."""
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
    box = runtime.create(RuntimeSpec(image=IMAGE), labels={"polar.test": unique()}, proxy=None, timeout=60)
    try:
        assert box.exec("sleep 60", timeout=0.5).timed_out
        assert ssh_programs() == []  # its own was the last
        for _ in range(3):
            assert box.exec("true", timeout=60).exit_code == 0
        kept = ssh_programs()
        assert len(kept) == 1
        for pid in kept:
            os.kill(pid, signal.SIGKILL)
        until(lambda: not ssh_programs())
        assert box.exec("echo again", timeout=60).output == b"again\n"
    finally:
        box.destroy()


def test_an_ssh_host_that_isn_t_there(ssh, monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    cases = {
        f"ssh://engine:{port}": "refused",
        f"{ssh}/no/such.sock": "no such file",
        ssh.replace("engine", "nobody-knows@engine"): "denied",
    }
    for url, word in cases.items():
        monkeypatch.setenv("DOCKER_HOST", url)
        runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
        ok, text = runtime.available()
        assert not ok and word in text.lower(), text
        with pytest.raises(InfraError) as e:
            runtime.create(RuntimeSpec(image=IMAGE), labels={}, proxy=None, timeout=30)
        assert (e.value.code, e.value.retryable) == ("runtime_create_failed", True)
    monkeypatch.setenv("DOCKER_HOST", f"{ssh}{engines.SOCKET}")
    assert DockerRuntime(Settings(data_dir=str(tmp_path))).available()[0]


@pytest.mark.parametrize(
    ("url", "inside"),
    [
        ("ssh://h", ["--", "h", "docker system dial-stdio"]),
        ("ssh://me@h:2222", ["-l", "me", "-p", "2222", "--", "h", "docker system dial-stdio"]),
        ("ssh://[::1]:22", ["-p", "22", "--", "::1", "docker system dial-stdio"]),
        ("ssh://h/a b/s", ["--", "h", "docker -H 'unix:///a b/s' system dial-stdio"]),
    ],
)
def test_the_ssh_command(url, inside):
    assert docker_ssh.command(url)[-len(inside) :] == inside
    assert urlsplit(url).hostname in inside


@pytest.mark.parametrize("url", ["ssh://", "ssh://h:port", "ssh://me:secret@h", "ssh://h?x=1", "ssh://h:70000"])
def test_what_is_no_ssh_address(url, monkeypatch, tmp_path):
    with pytest.raises(InvalidConfig, match="DOCKER_HOST") as e:
        docker_ssh.command(url)
    assert "secret" not in str(e.value)
    monkeypatch.setenv("DOCKER_HOST", url)
    assert not DockerRuntime(Settings(data_dir=str(tmp_path))).available()[0]
