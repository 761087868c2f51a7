"""A command of the `local` runtime inside bubblewrap: its mounts, its way to the proxy, and whether it came to run."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct, field

from polar.errors import InfraError, UnsupportedSpec
from polar.sandbox import ExecResult, ProxyEndpoint, SandboxRef
from polar.task import RuntimeSpec, Volume
from runtimes import bwrap, forward, holder, procs, seccomp
from runtimes.enter import in_memory

# On this host's side, since the sandbox's own shell may be the agent's work. Sandboxes die before their worker.
_LIMITED = 'echo 500 >/proc/self/oom_score_adj 2>/dev/null; ulimit -c 0; {limits} exec "$@"'
_ULIMIT = {
    "address_space_mb": ("v", 1024),
    "file_size_mb": ("f", 2048),
    "open_files": ("n", 1),
    "cpu_seconds": ("t", 1),
}


class Record(Struct, kw_only=True):
    """What is kept of a sandbox on this host; private to it, since `env` may hold secrets. `proxy` is set where its
    listener must be brought inside."""

    ref: SandboxRef
    env: dict[str, str] = field(default_factory=dict)
    network: str = "none"
    proxy: ProxyEndpoint | None = None
    volumes: list[Volume] = field(default_factory=list)
    mounts: list[str] = field(default_factory=list)
    rlimits: dict[str, int] = field(default_factory=dict)
    filtered: bool = True
    user: list[int] = field(default_factory=list)  # uid and gid inside; empty: the worker's own
    grouped: bool = False  # it has a control group
    cpus: float | None = None
    memory: int | None = None  # bytes
    pids: int | None = None
    disk: int | None = None  # bytes

    @property
    def cow(self) -> bool:
        """Has it a copy-on-write root?"""
        return self.ref.state.get("root") == "overlay"


def mount_points(spec: RuntimeSpec, *, cow: bool = False) -> tuple[str, ...]:
    """The writable folders of a boxed sandbox; with a copy-on-write root (`cow`) the working directory may also be one of
    the system's. Raises UnsupportedSpec for a place that can't be writable, or safe: a
    mount may not lie below a folder that the agent could exchange for a link, since mounting would follow it. What lies
    directly in a mounted folder can't be exchanged, being a mount point itself."""
    workdir = (spec.workdir or "/work").rstrip("/")
    if not workdir or ".." in workdir.split("/"):
        raise UnsupportedSpec(f"runtime.workdir: '{spec.workdir}' can't be a sandbox's working directory")
    if bwrap.under(workdir, bwrap.OWN) and not (cow and bwrap.under(workdir, bwrap.SYSTEM)):
        raise UnsupportedSpec(f"runtime.workdir: '{workdir}' is in a folder that the 'local' runtime keeps read-only")
    outer: list[str] = []
    for path in sorted({workdir, bwrap.HOME, "/tmp"}):
        if not bwrap.under(path, tuple(outer)):
            outer.append(path)
    for path in [*bwrap.python(), "/run"]:
        if bwrap.under(path, tuple(outer)) or bwrap.under(workdir, (path,)):
            raise UnsupportedSpec(f"runtime.workdir: '{workdir}' overlaps '{path}', which must stay read-only")
    for i, v in enumerate(spec.volumes):
        parent = v.target.rpartition("/")[0]
        below = parent not in outer and bwrap.under(parent, tuple(outer))
        if below or bwrap.under(v.target, bwrap.OWN) or any(bwrap.under(p, (v.target,)) for p in outer):
            raise UnsupportedSpec(f"runtime.volumes[{i}].target: '{v.target}' overlaps a folder of the sandbox's own")
    return tuple(outer)


def may_be_top(record: Record, top: str) -> bool:
    """May `top`, a folder right below the root, be made beside the mount points?"""
    taken = [*_taken(record), *bwrap.python(), *bwrap.OWN, "/run", "/home"]
    return not any(bwrap.under(t, (top,)) for t in taken)


class Command(NamedTuple):
    """What to start, the descriptors it inherits, what to do once it has them, a check of its result, which raises
    InfraError if the command itself never ran, and the environment to start it in, beside the marks."""

    argv: list[str]
    fds: tuple[int, ...]
    spawned: Callable[[], None]
    verify: Callable[[ExecResult], None]
    env: dict[str, str]


@contextlib.contextmanager
def boxed(
    record: Record,
    files: Path,
    data_dir: Path,
    inner: list[str],
    holding: procs.Proc | None,
    env: dict[str, str],
) -> Iterator[Command]:
    """`inner` in the sandbox whose files are below `files`, with a copy-on-write root in the mounts that `holding` holds.
    While the context lasts, the proxy is carried inside. `env` is `inner`'s alone: this host's programs on the way there
    run with the worker's rights, and a task's LD_PRELOAD or LD_DEBUG_OUTPUT must mean nothing to them."""
    found = bwrap.find()
    if isinstance(found, str):
        raise InfraError(f"bubblewrap doesn't work any more: {found}", code="exec_failed")
    with contextlib.ExitStack() as stack:
        status, theirs = os.pipe()
        ours = [theirs]  # ends that belong to the command once it has started
        stack.callback(os.close, status)

        def spawned() -> None:
            while ours:
                os.close(ours.pop())

        stack.callback(spawned)
        if record.proxy is not None:
            mine, channel = socket.socketpair()
            serving = forward.forwarder().serve_from(mine, bwrap.receive_listener, record.proxy)
            stack.callback(serving.close)
            ours.append(channel.detach())
            if holding is None:
                inner = bwrap.listening(inner, ours[1], forward.PORT)
        arguments = _arguments(record, files, data_dir) if holding is None else _in_holder(record, files)
        argv = [found.binary, *found.flags, "--json-status-fd", str(theirs), *arguments]
        ours.append(in_memory("polar-env", _setting(env)))
        argv += ["--args", str(ours[-1])]
        if record.filtered and seccomp.supported():
            ours.append(in_memory("polar-filter", seccomp.program()))
            argv += ["--seccomp", str(ours[-1])]
        if holding is not None:
            try:
                argv, opened = holder.entering(holding, ours[1] if record.proxy else -1, forward.PORT, argv)
            except OSError as e:
                raise InfraError(f"the sandbox can't be entered: {e}", code="exec_failed") from e
            for fd in opened:
                stack.callback(os.close, fd)
        fds = tuple(ours)

        def verify(result: ExecResult) -> None:
            spawned()
            # bubblewrap's own failures have exit codes like a command's; only its status channel tells them apart.
            if result.exit_code not in (None, 137) and b"exit-code" not in os.read(status, 1 << 16):
                text = result.output.decode("utf-8", "replace").strip()[-300:]
                raise InfraError(f"the sandbox can't be entered: {text}", code="exec_failed")

        argv = ["/bin/sh", "-c", _LIMITED.format(limits=limits(record)), "sh", *argv, "--", *inner]
        yield Command(argv, fds, spawned, verify, {"PATH": bwrap.PATH})


def limits(record: Record) -> str:
    """What can't be set is told by the command's own shell."""
    return "".join(
        f"ulimit -{letter} {record.rlimits[name] * unit} 2>/dev/null; "
        for name, (letter, unit) in _ULIMIT.items()
        if name in record.rlimits
    )


def _setting(env: dict[str, str]) -> bytes:
    """Options that set `env`, as they are read from a descriptor: so no other user of this host sees them."""
    for name, value in env.items():
        # Such a value would go on as an option of its own.
        if not name or "=" in name or "\0" in name + value:
            raise InfraError(f"environment: {name!r} can't be set", code="exec_failed", retryable=False)
    words = [word for pair in env.items() for word in ("--setenv", *pair)]
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def _common(record: Record, *, own_network: bool) -> list[str]:
    # The host name is the sandbox's id, so that the process can be found by it.
    args = ["--hostname", record.ref.handle, "--die-with-parent", "--new-session"]
    if own_network:
        args += ["--unshare-net"]
    if record.user:
        args += ["--uid", str(record.user[0]), "--gid", str(record.user[1])]
    return args


def _in_holder(record: Record, files: Path) -> list[str]:
    """All is mounted already but what each command has of its own. These places lie directly in the root: nobody inside
    can exchange what is mounted there."""
    args = _common(record, own_network=record.network != "internet" and record.proxy is None)
    args += ["--bind", str(files), "/", *bwrap.proc(), "--dev", "/dev", "--tmpfs", "/run"]
    if record.network == "internet" and (real := bwrap.resolver()) and bwrap.under(real, ("/run",)):
        args += ["--ro-bind", real, real]
    return args


def _arguments(record: Record, files: Path, data_dir: Path) -> list[str]:
    args = _common(record, own_network=record.network != "internet")
    args += bwrap.system_binds(str(data_dir))
    beside = bwrap.environment(_taken(record))
    args += [arg for path in beside for arg in ("--ro-bind", path, path)]
    if bwrap.under(str(data_dir), (*bwrap.SYSTEM, *bwrap.python(), *beside)):
        args += ["--tmpfs", str(data_dir)]
    if record.network == "internet" and (real := bwrap.resolver()):
        args += ["--ro-bind", real, real]
    for path in _writable(record, files):
        args += ["--bind", str(files / path.lstrip("/")), path]
    for v in record.volumes:
        args += ["--ro-bind", v.source, v.target]
    # A read-only root: what can't last must not seem to.
    return [*args, *bwrap.proc(), "--dev", "/dev", "--tmpfs", "/run", "--remount-ro", "/"]


def _writable(record: Record, files: Path) -> list[str]:
    """The mount points, and the top folders that uploads made beside them."""
    tops = {"/" + e.name for e in os.scandir(files) if e.is_dir(follow_symlinks=False)}
    return [*record.mounts, *sorted(t for t in tops if may_be_top(record, t))]


def _taken(record: Record) -> list[str]:
    return [*record.mounts, *(v.target for v in record.volumes)]
