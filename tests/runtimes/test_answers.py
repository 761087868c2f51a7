"""An answer that isn't whole never reaches the agent as a clean end, by whatever way it comes and however it breaks."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from polar.config import Settings
from polar.sandbox import ProxyEndpoint, Sandbox
from polar.task import RuntimeSpec
from runtimes import docker_bridge, forward
from runtimes.answers import Answers
from runtimes.docker import DockerRuntime
from tests.runtimes import breaking
from tests.runtimes.conftest import IMAGE, docker_missing, ensure_image, unique, until

CHUNKED = "HTTP/1.1 200 OK\r\nServer: x\r\nTransfer-Encoding: chunked\r\n\r\n"
STREAM = CHUNKED + "6\r\ndata: \r\n10;x=y\r\n0\r\n\r\n0123456789\n\r\n"
DONE = STREAM + "0\r\n\r\n"
SIZED = "HTTP/1.1 200 OK\r\ncontent-length:6\r\n\r\nanswer"
EMPTY = "HTTP/1.1 204 No Content\r\n\r\n"
NOTHING = "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
CONTINUE = "HTTP/1.1 100 Continue\r\n\r\n"
HEAD = "HTTP/1.1 200 OK\r\nContent-Length: 17\r\n\r\n"
OLD = "HTTP/1.0 200 OK\r\n\r\nuntil the end"
UPGRADE = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n\1\2"
TRAILED = STREAM + "0\r\nA: b\r\n\r\n"

WHOLE = {
    "nothing": [],
    "a stream": [DONE],
    "a stream and its end": [STREAM, "0\r\n\r\n"],
    "trailers": [TRAILED],
    "a length": [SIZED],
    "several": [DONE, SIZED, DONE, NOTHING, EMPTY, DONE],
    "several at once": [DONE + SIZED + CONTINUE + DONE],
    "no length": [OLD],
    "an upgrade": [UPGRADE],
    **{f"an end cut at {n}": [STREAM + "0\r\n\r\n"[:n], "0\r\n\r\n"[n:]] for n in range(1, 5)},
}
BROKEN = {
    "half a head": [CHUNKED[:30]],
    "a head": [CHUNKED],
    "half a chunk": [CHUNKED + "6\r\ndat"],
    "a chunk without its end": [CHUNKED + "6\r\ndata: "],
    "no last chunk": [STREAM],
    "data like a last chunk": [CHUNKED + "10\r\n0\r\n\r\n"],
    **{f"an end without its last {5 - n}": [STREAM + "0\r\n\r\n"[:n]] for n in range(1, 5)},
    "half a length": [SIZED[:-3]],
    "no body": [HEAD],
    "the second": [SIZED + DONE, STREAM],
    "no HTTP": ["nonsense\r\n\r\n"],
    "no size": [CHUNKED + "x\r\n\r\n", "0\r\n\r\n"],
    "a negative size": [CHUNKED + "-5\r\n", "0\r\n\r\n"],
    "a negative length": [SIZED.replace("6", "-6")],
}


def whole(*pieces: str) -> bool:
    answers = Answers()
    for piece in pieces:
        answers.feed(piece.encode())
    return answers.whole()


@pytest.mark.parametrize("pieces", WHOLE.values(), ids=WHOLE)
def test_whole_however_it_is_cut(pieces):
    text = "".join(pieces)
    assert whole(*pieces) and whole(*text)
    assert all(whole(text[:n], text[n:]) for n in range(len(text)))


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
def test_broken_however_it_is_cut(pieces):
    text = "".join(pieces)
    assert not whole(*pieces) and not whole(*text)
    assert not any(whole(text[:n], text[n:]) for n in range(len(text)))


def test_every_other_place_is_within_an_answer():
    parts = [DONE, SIZED, TRAILED, NOTHING, DONE]
    ends = {len("".join(parts[:n])) for n in range(len(parts) + 1)}
    text = "".join(parts)
    assert {n for n in range(len(text) + 1) if whole(text[:n])} == ends


def test_the_answer_to_head_has_no_body():
    answers = Answers()
    for request, answer, is_whole in (
        (b"HEAD / HTTP/1.1\r\n\r\n", CONTINUE + HEAD, True),
        (b"POST / HTTP/1.1\r\n\r\n", STREAM, False),
        (b"HEAD / HTTP/1.1\r\n\r\n", "0\r\n\r\n", True),  # it was too early: who asks so gets a reset, at worst
        (b"POST / HTTP/1.1\r\n\r\n", HEAD, False),
    ):
        answers.asked(request)
        answers.feed(answer.encode())
        assert answers.whole() is is_whole


def test_memory_is_bounded():
    for text in (b"HTTP/1.1 200 OK\r\n", CHUNKED.encode()):
        answers = Answers()
        answers.feed(text)
        for _ in range(100):
            answers.feed(b"a" * 4000)
        assert not answers.whole() and len(answers._part) < 1 << 17


def test_the_relay_runs_under_an_old_python():
    ast.parse(docker_bridge.relay(1, "/x"), feature_version=(3, 6))


# -- through what carries it


def process(*args: str) -> set[int]:
    """Those that have these arguments."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            argv = Path("/proc", pid, "cmdline").read_bytes()
            if all(a.encode() in argv for a in args):
                found.add(int(pid))
    return found


def listener_of(kind: str, folder: str) -> socket.socket:
    if kind == "tcp":
        return socket.create_server(("127.0.0.1", 0), backlog=64)
    s = socket.socket(socket.AF_UNIX)
    s.bind(f"{folder}/sock")
    os.chmod(f"{folder}/sock", 0o666)
    s.listen(64)
    return s


@contextlib.contextmanager
def proxy(kind: str = "unix") -> Iterator[ProxyEndpoint]:
    with tempfile.TemporaryDirectory(prefix="polar-breaking-", dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        with listener_of(kind, folder) as s:
            argv = [sys.executable, breaking.__file__, "serve", str(s.fileno())]
            serving = subprocess.Popen(argv, pass_fds=[s.fileno()])
            try:
                if kind == "tcp":
                    yield ProxyEndpoint(url=f"http://127.0.0.1:{s.getsockname()[1]}")
                else:
                    yield ProxyEndpoint(url="http://unused:1", socket=f"{folder}/sock")
            finally:
                serving.kill()
                serving.wait()


@contextlib.contextmanager
def entered(way: str, to: ProxyEndpoint) -> Iterator[int]:
    """A port that leads there."""
    if way == "forwarder":
        listener = socket.create_server(("127.0.0.1", 0))
        serving = forward.forwarder().serve(listener, to)
        yield listener.getsockname()[1]
        serving.close()
        return
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    if way == "relay":
        mark, command = "class Answers", [sys.executable, "-I", "-S", "-c", docker_bridge.relay(port, to.socket)]
    else:
        mark, command = "UNIX-CONNECT", ["sh", "-c", docker_bridge.socat(port, to.socket)]
    subprocess.run(command, check=True, timeout=60)  # it leaves the relay behind
    try:
        yield port
    finally:
        for pid in process(to.socket, mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not process(to.socket, mark))


WAYS = ["forwarder-tcp", "forwarder-unix", "relay-unix", "socat-unix"]


@pytest.fixture(scope="module", params=WAYS)
def way(request) -> Iterator[tuple[str, int]]:
    carrier, kind = request.param.split("-")
    if carrier == "socat" and not shutil.which("socat"):
        pytest.skip("socat is not installed")
    with proxy(kind) as endpoint, entered(carrier, endpoint) as port:
        yield carrier, port


@pytest.mark.parametrize("ending", ["abort", "close", "kill"])
@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN)
def test_a_broken_answer_is_a_reset(way, pieces, ending):
    assert breaking.ask(way[1], {"pieces": pieces, "ending": ending}) == "reset"


@pytest.mark.parametrize("ending", ["close", "kill"])
@pytest.mark.parametrize("pieces", WHOLE.values(), ids=WHOLE)
def test_a_whole_answer_ends_plainly(way, pieces, ending):
    carrier, port = way
    # socat knows no HTTP: the proxy's end is always a reset, when all has arrived.
    expected = "reset" if carrier == "socat" else "end"
    assert breaking.ask(port, {"pieces": pieces, "ending": ending}) == expected


def test_an_agent_that_asks_for_heads_only(way):
    carrier, port = way
    order = {"method": "HEAD", "pieces": [HEAD], "ending": "kill"}
    assert breaking.ask(port, order) == ("reset" if carrier == "socat" else "end")
    assert breaking.ask(port, order | {"pieces": [HEAD, STREAM]}) == "reset"


def test_nothing_is_left_of_broken_connections():
    """Threads and descriptors of the relay, whose agent never reads to the end."""
    with proxy() as endpoint, entered("relay", endpoint) as port:
        (pid,) = process(endpoint.socket, "class Answers")

        def held() -> tuple[int, int]:
            return len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))

        before = held()
        for pieces in (*BROKEN.values(), *WHOLE.values()):
            breaking.ask(port, {"pieces": pieces, "ending": "close"})
        until(lambda: held() == before)


# -- in sandboxes

ORDERS = [
    ({"pieces": [STREAM], "ending": "abort"}, "reset"),
    ({"pieces": [DONE, STREAM], "ending": "kill"}, "reset"),
    ({"pieces": [SIZED[:-3]], "ending": "kill"}, "reset"),
    ({"method": "HEAD", "pieces": [HEAD, STREAM], "ending": "close"}, "reset"),
    ({"method": "HEAD", "pieces": [HEAD, DONE, SIZED], "ending": "close"}, "end"),
    ({"pieces": [DONE], "ending": "kill"}, "end"),
]


def check(box: Sandbox) -> None:
    box.write("breaking.py", Path(breaking.__file__).read_bytes())
    orders, expected = zip(*ORDERS, strict=True)
    port = str(urlsplit(box.ref.proxy_url).port)
    r = box.exec(["python3", "breaking.py", "ask", port, json.dumps(orders)], timeout=60)
    assert r.exit_code == 0, r.output
    assert json.loads(r.output) == list(expected)


def test_in_every_sandbox(backend, make):
    if not backend.boxed:
        pytest.skip("plain processes use the proxy's own port")
    with proxy() as endpoint:
        check(make(endpoint))


@pytest.mark.docker
def test_in_a_container_by_the_relay(tmp_path, monkeypatch):
    if why := docker_missing():
        pytest.skip(why)
    ensure_image()
    monkeypatch.setattr(docker_bridge, "may_enter", lambda: False)
    runtime = DockerRuntime(Settings(data_dir=str(tmp_path)))
    with proxy() as endpoint:
        box = runtime.create(
            RuntimeSpec(image=IMAGE), labels={"polar.test": f"answers-{unique()}"}, proxy=endpoint, timeout=60
        )
        try:
            assert box.ref.state["bridge"] == docker_bridge.RELAY
            check(box)
        finally:
            box.destroy()
