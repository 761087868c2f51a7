"""One command in a running container: its streams over the engine's hijacked connection."""

from __future__ import annotations

import contextlib
import math
import re
import select
import ssl
import time
from typing import Any

from docker.errors import APIError, NotFound

from polar.errors import InfraError
from runtimes.bounds import Ended
from runtimes.docker_engine import Busy, Engine, translated
from runtimes.output import Output
from runtimes.watch import Watch

CHUNK = 1 << 16
_STDERR = 2
_KEPT = 4096  # bytes of what the engine says
QUIET = 5.0  # seconds without output after which the engine is asked whether the command still runs
_ASK = 1.0  # seconds that asking may wait, and take: nobody looks at the deadline meanwhile
_PATIENCE = 60.0  # seconds for a free slot, to learn how a command ended whose time is over
# The engine's and runc's words for a container that ended between a look at it and the command.
_TOO_LATE = re.compile(
    r"cannot exec in a (stopped|deleted)|container that has stopped|container not running|Container \w+ is not running"
)
# Failures that are the command's own, though the engine reports them.
_OWN = (("executable file not found", 127), ("no such file or directory", 127), ("permission denied", 126))


class Frames:
    """The engine's multiplexed stream: 8 bytes of header (stream, three zeros, length), then the payload.

    A command has both of its outputs on the first stream (`_merged`). What comes on the second, to `engine_said`, is the
    engine's: Podman tells there how the program that starts commands failed, and of its own trouble with closed inputs.
    """

    def __init__(self, output: Output):
        self._output = output
        self._buffer = bytearray()
        self._left = 0
        self._stream = 1
        self.engine_said = b""

    def feed(self, data: bytes) -> None:
        self._buffer += data
        while self._buffer:
            if self._left:
                part = bytes(self._buffer[: self._left])
                del self._buffer[: len(part)]
                self._left -= len(part)
                if self._stream == _STDERR:
                    self.engine_said = (self.engine_said + part)[:_KEPT]
                else:
                    self._output.feed(part)
            elif len(self._buffer) < 8:
                return
            else:
                self._stream = self._buffer[0]
                self._left = int.from_bytes(self._buffer[4:8], "big")
                del self._buffer[:8]


def run(
    engine: Engine,
    container: str,
    argv: list[str],
    *,
    env: dict[str, str],
    cwd: str,
    user: str,
    stdin: bytes | None,
    watch: Watch,
    output: Output,
) -> int | None:
    """Its exit code, or None when `watch` expired: then it still runs. Raises Ended, InfraError, or NotFound
    without container."""
    frames = Frames(output)
    with engine.call() as api:
        command = _merged(argv, stdin if engine.is_tls() else None)
        try:
            made = api.exec_create(
                container, command, stdin=stdin is not None, environment=env, workdir=cwd, user=user or ""
            )
            # The SDK's own way to this connection loses what came in one packet with the headers.
            response = api._post_json(
                api._url("/exec/{0}/start", made["Id"]),
                headers={"Connection": "Upgrade", "Upgrade": "tcp"},
                data={"Tty": False, "Detach": False},
                stream=True,
            )
            api._raise_for_status(response)
        except APIError as e:
            if e.status_code != 409 and not _TOO_LATE.search(str(e.explanation)):
                raise
            raise Ended(f"Docker engine: {e.explanation}", code="exec_failed") from e
    try:
        with translated("exec_failed"):
            ended = _pump(engine, made["Id"], response, stdin, watch, frames)
    finally:
        response.close()
    if not ended:
        return None
    code, started = _exit_code(engine, made["Id"], watch)
    if engine.is_podman():  # it forgets the pid of what has ended
        started = not (code in (126, 127) and b"OCI " in frames.engine_said)
    if not started and code != 0:
        output.feed(frames.engine_said)
        said = output.tail.decode("utf-8", "replace").strip()
        if late := _TOO_LATE.search(said):
            output.forget()
            raise Ended(f"Docker engine: {late[0]}", code="exec_failed")
        return _engine_failure(said)
    return code


def _merged(argv: list[str], counted: bytes | None) -> list[str]:
    """With one output: the engine's two come in no certain order, one keeps what was written first first. `counted`: input
    whose end the command can't be told by closing one half of the connection, as TLS has none."""
    if counted is None:
        return ["sh", "-c", 'exec 2>&1; exec "$@"', "sh", *argv]
    return ["sh", "-c", 'exec 2>&1; n=$1; shift; head -c "$n" | exec "$@"', "sh", str(len(counted)), *argv]


def _pump(engine: Engine, exec_id: str, response: Any, stdin: bytes | None, watch: Watch, frames: Frames) -> bool:
    reader = response.raw._fp.fp
    sock = reader.raw._sock
    sock.setblocking(False)
    if early := _buffered(reader):
        frames.feed(early)
    pending = memoryview(stdin or b"")
    writing = stdin is not None
    heard = time.monotonic()
    while not watch.expired():
        ready, writable = _poll(sock, writing, watch.wait())
        if writable and writing:
            pending, writing = _send(sock, pending)
        if ready:
            heard = time.monotonic()
            data = _receive(sock)
            if data == b"":
                return True
            frames.feed(data or b"")
        elif time.monotonic() - heard > QUIET:
            # Some engines hold the stream open for a child that the command left behind.
            heard = time.monotonic()
            if not _may_run(engine, exec_id):
                return True
    return False


def _may_run(engine: Engine, exec_id: str) -> bool:
    """True also where the engine has no time to tell: it is asked again later, and the command goes on."""
    with contextlib.suppress(InfraError), engine.call(timeout=_ASK, wait=_ASK) as api:
        return bool(api.exec_inspect(exec_id)["Running"])
    return True


def _buffered(reader: Any) -> bytes:
    """What came in one packet with the headers."""
    try:
        return reader.read(len(reader.peek()))
    except ssl.SSLWantReadError:  # nothing; plain sockets say so by an empty answer
        return b""


def _poll(sock: Any, writing: bool, wait: float) -> tuple[bool, bool]:
    """Is there something to read, is there room to write? Not by `select`, which takes descriptors below 1024 only."""
    decrypted = isinstance(sock, ssl.SSLSocket) and sock.pending() > 0
    poll = select.poll()
    poll.register(sock, select.POLLIN | (select.POLLOUT if writing else 0))
    found = poll.poll(0 if decrypted else math.ceil(wait * 1000))
    events = found[0][1] if found else 0
    # An error or a hang-up is told by both reading and writing.
    return decrypted or bool(events & ~select.POLLOUT), writing and bool(events & ~select.POLLIN)


def _receive(sock: Any) -> bytes | None:
    """b"" at the end, None if there is nothing now."""
    try:
        return sock.recv(CHUNK)
    except (BlockingIOError, ssl.SSLWantReadError):
        return None
    except ConnectionResetError:
        return b""


def _send(sock: Any, pending: memoryview) -> tuple[memoryview, bool]:
    """What is left, and whether there is more to do: the end of the input must be told too."""
    try:
        pending = pending[sock.send(pending[:CHUNK]) :] if pending else pending
    except (BlockingIOError, ssl.SSLWantWriteError):
        return pending, True
    except OSError:  # the command doesn't read its input
        return memoryview(b""), False
    if pending:
        return pending, True
    if not isinstance(sock, ssl.SSLSocket):  # its `shutdown` would end both directions
        with contextlib.suppress(OSError):
            sock.shutdown(1)
    return pending, False


def _exit_code(engine: Engine, exec_id: str, watch: Watch) -> tuple[int, bool]:
    """And whether the command ever was a process: what it prints can't pass for a failure of the engine's."""
    patience, deadline = time.monotonic() + _PATIENCE, math.inf
    while True:
        try:
            with engine.call(wait=_ASK) as api:
                state = api.exec_inspect(exec_id)
        except Busy:  # the command's time is there to wait for a slot, too
            if time.monotonic() > patience and watch.expired():
                raise
            continue
        except NotFound as e:
            raise InfraError("the container went away while a command ran", code="exec_failed") from e
        if not state["Running"] and state["ExitCode"] is not None:
            if state["ExitCode"] < 0:
                raise InfraError("the engine lost sight of the command", code="exec_failed")
            return int(state["ExitCode"]), bool(state["Pid"])
        deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            raise InfraError("the engine doesn't tell how the command ended", code="exec_failed")
        time.sleep(0.02)


def _engine_failure(text: str) -> int:
    for words, code in _OWN:
        if words in text:
            return 126 if "chdir to cwd" in text else code
    raise InfraError(f"Docker engine: {text[-300:]}", code="exec_failed")
