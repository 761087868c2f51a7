"""Running one process of this host to its end, its deadline or its cancellation, with bounded output."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
from collections.abc import Callable

from polar.errors import InfraError
from polar.sandbox import ExecResult
from runtimes.bounds import outcome
from runtimes.output import Output
from runtimes.watch import Watch

CHUNK = 1 << 16
PIPE_MAX = 1 << 20  # what a pipe can hold at most: no more can be left behind by a process that has ended


def supervise(
    argv: list[str],
    *,
    env: dict[str, str],
    cwd: str | None,
    stdin: bytes | None,
    watch: Watch,
    output: Output,
    kill: Callable[[int], None],
    pass_fds: tuple[int, ...] = (),
    spawned: Callable[[], None] = lambda: None,
) -> ExecResult:
    """Start `argv` as leader of its own session. `kill(pid)` must end it and all that it started; it is called at the
    deadline, on cancellation, and when anything here fails. `spawned()` runs right after the start.

    Processes that an ordinarily ended command left behind live on. Raises InfraError `exec_failed`."""
    try:
        process = subprocess.Popen(
            argv,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            bufsize=0,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except (OSError, ValueError) as e:
        raise InfraError(f"can't start '{argv[0]}': {e}", code="exec_failed") from e
    try:
        spawned()
        ended = _pump(process, stdin, watch, output)
        if not ended:
            kill(process.pid)
            process.wait(timeout=10)
            assert process.stdout is not None
            _rest(process.stdout.fileno(), output)
    except BaseException:
        kill(process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        raise
    finally:
        for pipe in (process.stdin, process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()
    code = process.returncode
    # A signal is told the way a shell tells it.
    return outcome(None if not ended else (128 - code if code < 0 else code), watch, output)


def _pump(process: subprocess.Popen, stdin: bytes | None, watch: Watch, output: Output) -> bool:
    """Move bytes until the process has ended (True) or must end (False)."""
    assert process.stdout is not None
    out, pidfd = process.stdout.fileno(), os.pidfd_open(process.pid)
    os.set_blocking(out, False)
    pending = memoryview(stdin or b"")
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            selector.register(pidfd, selectors.EVENT_READ)
            if process.stdin:
                os.set_blocking(process.stdin.fileno(), False)
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while not watch.expired():
                for key, _ in selector.select(watch.wait()):
                    if key.fd == out:
                        if _read(out, output) == b"":
                            selector.unregister(out)
                    elif key.fd == pidfd:
                        if process.poll() is not None:
                            _rest(out, output)
                            return True
                    else:
                        pending = _write(key.fd, pending)
                        if not pending:
                            selector.unregister(key.fileobj)
                            process.stdin.close()  # type: ignore[union-attr]
            return False
    finally:
        os.close(pidfd)


def _read(fd: int, output: Output) -> bytes | None:
    """One chunk; b"" at the end; None if there is nothing now."""
    try:
        data = os.read(fd, CHUNK)
    except BlockingIOError:
        return None
    output.feed(data)
    return data


def _rest(fd: int, output: Output) -> None:
    """What the ended command had written. A child it left may go on writing: hence the bound."""
    before = output.total
    while output.total - before < PIPE_MAX and _read(fd, output):
        pass


def _write(fd: int, pending: memoryview) -> memoryview:
    try:
        return pending[os.write(fd, pending[:CHUNK]) :] if pending else pending
    except BlockingIOError:
        return pending
    except OSError:  # the command doesn't read its input
        return memoryview(b"")
