"""Programs of this host that join an Apptainer instance: to become a command in it, or to open the proxy's listener."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable

from polar.errors import InfraError
from polar.sandbox import ExecResult
from runtimes import enter, forward, procs
from runtimes.apptainer_cli import Cli
from runtimes.bounds import Ended
from runtimes.bwrap import receive_listener
from runtimes.output import Output
from runtimes.supervise import supervise
from runtimes.watch import Watch

LISTEN_TIMEOUT = 30.0


def run(
    cli: Cli,
    target: enter.Inside,
    command: list[str],
    *,
    env: dict[str, str],
    host_env: dict[str, str],
    stdin: bytes | None,
    watch: Watch,
    output: Output,
    kill: Callable[[int], None],
    wrap: Callable[[list[str]], list[str]],
) -> ExecResult:
    """`env` is the command's; `host_env` that of the program before it joins. `wrap` puts the whole into its control
    group. Raises Ended, InfraError."""
    with contextlib.ExitStack() as stack:
        env_fd = enter.in_memory("polar-env", _pairs(env))
        stack.callback(os.close, env_fd)
        filter_fd = enter.filter_fd(target.filtered)
        if filter_fd >= 0:
            stack.callback(os.close, filter_fd)
        status, theirs = os.pipe()
        stack.callback(os.close, status)
        closing = stack.enter_context(contextlib.ExitStack())
        closing.callback(os.close, theirs)
        argv = enter.argv(cli.python, target, command, env=env_fd, filter=filter_fd, channel=-1, port=0, status=theirs)
        result = supervise(
            wrap(cli.as_owner(argv)),
            env=host_env,
            cwd="/",
            stdin=stdin,
            watch=watch,
            output=output,
            kill=kill,
            pass_fds=tuple(fd for fd in (env_fd, filter_fd, theirs) if fd >= 0),
            spawned=closing.close,
        )
        failure = _told(status)
        if result.exit_code is not None and failure:
            lives = (p := procs.read(target.pid)) and p.start == target.start
            raise (InfraError if lives else Ended)(f"the sandbox can't be entered: {failure}", code="exec_failed")
        return result


def listen(cli: Cli, first: procs.Proc, *, host_env: dict[str, str]) -> socket.socket:
    """A listener in the network that the process `first` sees. Raises OSError, InfraError."""
    mine, theirs = socket.socketpair()
    env_fd, (status, told) = enter.in_memory("polar-env", b""), os.pipe()
    with mine:
        try:
            target = enter.Inside(pid=first.pid, start=first.start, cwd="/")
            numbers = {"env": env_fd, "filter": -1, "channel": theirs.fileno(), "port": forward.PORT, "status": told}
            result = supervise(
                cli.as_owner(enter.argv(cli.python, target, [], **numbers)),
                env=host_env,
                cwd="/",
                stdin=None,
                watch=Watch(LISTEN_TIMEOUT, None),
                output=Output(4096, None, 0),
                kill=_kill_family,
                pass_fds=(env_fd, theirs.fileno(), told),
            )
            theirs.close()
            listener = receive_listener(mine) if result.exit_code == 0 else None
            if listener is None:
                raise OSError(0, _told(status) or "no listener came")
            return listener
        finally:
            theirs.close()
            for fd in (env_fd, status, told):
                os.close(fd)


def _kill_family(pid: int) -> None:
    procs.kill_all(lambda all: procs.with_family({pid} & all.keys(), all))


def _pairs(env: dict[str, str]) -> bytes:
    return b"".join(f"{k}={v}".encode("utf-8", "surrogateescape") + b"\0" for k, v in env.items())


def _told(fd: int) -> str:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1000).decode("utf-8", "replace")
    except BlockingIOError:
        return ""
