"""A listener inside another network namespace, opened from outside."""

from __future__ import annotations

import ctypes
import os
import socket
import threading

_CLONE_NEWNET = 0x40000000


def listen(pid: int, port: int) -> socket.socket:
    """A socket that listens on 127.0.0.1:`port` of the network that process `pid` sees, usable from this process.

    Several processes may listen at once; the kernel shares the connections out and forgets those that died. Needs root.
    Raises OSError.
    """
    result: list[socket.socket | OSError] = []

    def enter() -> None:
        # The thread ends right after, so nothing else ever runs in the foreign namespace.
        try:
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(fd, _CLONE_NEWNET):
                    number = ctypes.get_errno()
                    raise OSError(number, f"can't enter the network namespace: {os.strerror(number)}")
            finally:
                os.close(fd)
            s = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                s.bind(("127.0.0.1", port))
                s.listen(128)
            except OSError:
                s.close()
                raise
            result.append(s)
        except OSError as e:
            result.append(e)

    thread = threading.Thread(target=enter, name="polar-netns")
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def is_container(pid: int, container: str) -> bool:
    """Is `pid` of this machine the container's? An engine elsewhere tells pids that mean other processes here."""
    if pid <= 0 or _read(f"/proc/{pid}/ns/net") == _read("/proc/self/ns/net"):
        return False
    for name in ("cgroup", "mountinfo"):
        try:
            with open(f"/proc/{pid}/{name}") as f:
                if container in f.read():
                    return True
        except OSError:
            return False
    return False


def _read(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
