"""Carrying connections to the proxy: what breaks must look broken, on both sides, at once."""

from __future__ import annotations

import gc
import os
import socket
import threading
from collections.abc import Iterator

import pytest

from polar.sandbox import ProxyEndpoint
from runtimes import bwrap, forward, netns
from tests.runtimes.conftest import until

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nanswer"


@pytest.fixture
def upstream() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as s:
        s.settimeout(10)
        yield s


@pytest.fixture
def entrance(upstream) -> Iterator[tuple[str, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    serving = forward.forwarder().serve(listener, ProxyEndpoint(url=f"http://127.0.0.1:{upstream.getsockname()[1]}"))
    yield address
    serving.close()


def connect(address) -> socket.socket:
    return socket.create_connection(address, timeout=10)


def test_large_answers_both_ways(upstream, entrance):
    data = os.urandom(3_000_000)
    client = connect(entrance)
    server, _ = upstream.accept()
    for a, b in ((client, server), (server, client)):
        t = threading.Thread(target=a.sendall, args=(data,))
        t.start()
        got = b""
        while len(got) < len(data):
            got += b.recv(1 << 16)
        t.join()
        assert got == data
    client.close()
    server.close()


def test_half_closed_request_gets_its_answer(upstream, entrance):
    with connect(entrance) as client:
        client.sendall(b"request")
        client.shutdown(socket.SHUT_WR)
        server, _ = upstream.accept()
        with server:
            server.settimeout(10)
            assert server.recv(100) == b"request" and server.recv(100) == b""
            server.sendall(ANSWER)
        assert client.recv(100) == ANSWER and client.recv(100) == b""


def test_a_reset_of_the_client_reaches_the_proxy(upstream, entrance, caplog):
    client = connect(entrance)
    client.sendall(b"request")
    server, _ = upstream.accept()
    with server:
        server.settimeout(10)
        assert server.recv(100) == b"request"
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        try:
            assert server.recv(100) == b""
        except ConnectionResetError:
            pass
    forward.forwarder().run(gc.collect)
    assert "never retrieved" not in caplog.text


def test_a_reset_of_the_proxy_is_no_clean_end(upstream, entrance):
    with connect(entrance) as client:
        client.sendall(b"request")
        server, _ = upstream.accept()
        server.settimeout(10)
        server.recv(100)
        server.sendall(b"half an ans")
        assert client.recv(100) == b"half an ans"
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        server.close()
        with pytest.raises(ConnectionResetError):
            client.recv(100)


def test_too_many_connections_are_turned_away(upstream, entrance, monkeypatch):
    monkeypatch.setattr(forward, "MAX_CONNECTIONS", 3)
    clients = [connect(entrance) for _ in range(3)]
    served = [upstream.accept()[0] for _ in range(3)]
    with connect(entrance) as more:
        assert more.recv(1) == b""
    for s in (*clients, *served):
        s.close()

    def again() -> bool:
        with connect(entrance) as c:
            c.settimeout(0.2)
            try:
                return c.recv(1) != b""
            except TimeoutError:
                return True

    assert until(again)


def test_a_connection_waits_for_the_proxy(tmp_path):
    path = str(tmp_path / "p")
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    serving = forward.forwarder().serve(listener, ProxyEndpoint(url="http://unused:1", socket=path))
    with connect(address) as client:
        client.sendall(b"early")
        with socket.socket(socket.AF_UNIX) as s:
            s.bind(path)
            s.listen()
            s.settimeout(10)
            server, _ = s.accept()
            with server:
                assert server.recv(100) == b"early"
    serving.close()


def test_closing_ends_the_listener_only(upstream):
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    serving = forward.forwarder().serve(listener, ProxyEndpoint(url=f"http://127.0.0.1:{upstream.getsockname()[1]}"))
    with connect(address) as client:
        client.sendall(b"x")
        server, _ = upstream.accept()
        with server:
            serving.close()
            with pytest.raises(ConnectionRefusedError):
                connect(address)
            server.sendall(b"still")
            assert client.recv(10) == b"still"


@pytest.mark.parametrize("what", ["nothing", "file", "plain socket", "unix listener"])
def test_only_a_listener_is_taken_from_inside(tmp_path, what):
    mine, theirs = socket.socketpair()
    given: list[int] = []
    if what == "file":
        given = [os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)]
    elif what == "plain socket":
        given = [socket.socket().detach()]
    elif what == "unix listener":
        s = socket.socket(socket.AF_UNIX)
        s.bind(str(tmp_path / "u"))
        s.listen()
        given = [s.detach()]
    if given:
        socket.send_fds(theirs, [b"x"], given)
    theirs.close()
    before = len(os.listdir("/proc/self/fd"))
    assert bwrap.receive_listener(mine) is None
    assert len(os.listdir("/proc/self/fd")) == before
    mine.close()
    for fd in given:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="entering a network namespace needs root")
def test_several_processes_may_listen_in_one_namespace():
    first = netns.listen(os.getpid(), 0)
    port = first.getsockname()[1]
    second = netns.listen(os.getpid(), port)
    assert second.getsockname() == first.getsockname() == ("127.0.0.1", port)
    first.close()
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        second.settimeout(5)
        second.accept()[0].close()
    second.close()


def test_a_foreign_pid_is_no_container():
    assert not netns.is_container(os.getpid(), "")
    assert not netns.is_container(0, "x") and not netns.is_container(1 << 30, "x")
