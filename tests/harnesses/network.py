"""Who a sandbox tries to reach: its own network namespace, made to swallow the whole Internet and to write down the names.

All addresses become local to the sandbox (Linux' AnyIP), a name server there knows no name, and every packet that leaves
for a foreign address is seen on the loopback device. Needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_ETH_P_ALL = 0x0003
MARK = "POLAR_SANDBOX"
# Waits until the watch is on, then becomes the agent's command. The main table's route is the sign.
WAIT = """#!/bin/sh
n=0
until grep -q '^lo\t00000000\t' /proc/net/route; do
  n=$((n + 1)); [ $n -gt 600 ] && { echo 'nobody watches this network' >&2; exit 125; }
  sleep 0.05
done
exec %s "$@"
"""


def available() -> str:
    """Why sandboxes can't be watched here; empty if they can."""
    if os.geteuid() != 0:
        return "watching a sandbox's network needs root"
    if not shutil.which("ip"):
        return "watching a sandbox's network needs iproute2"
    return ""


class Watch:
    """`with Watch(find): …`; `foreign` are names looked up, and addresses connected to, outside the sandbox. A sandbox may have
    one network for each command that it runs: all are watched."""

    def __init__(self, find: Callable[[], int | None]):
        self._find = find
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="network-watch", daemon=True)
        self._names: list[socket.socket] = []
        self._packets: list[socket.socket] = []
        self.foreign: set[str] = set()
        self.networks = 0
        self.error = ""

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        look = 0.0
        try:
            while not self._stop.is_set():
                if time.monotonic() >= look:  # not with every packet: it reads all of /proc
                    if (pid := self._find()) is not None:
                        self._enter(pid)
                    look = time.monotonic() + 0.1
                self._listen()
        except OSError as e:
            self.error = str(e)
        finally:
            for s in (*self._names, *self._packets):
                s.close()

    def _enter(self, pid: int) -> None:
        try:
            fd = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # it is over already
            return
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(fd, _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "can't enter the sandbox's network")
        finally:
            os.close(fd)
        self._names.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        self._names[-1].bind(("0.0.0.0", 53))
        _ip("link set lo up")  # first: a socket that is bound to a device that is down fails later
        self._packets.append(socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(_ETH_P_ALL)))
        self._packets[-1].bind(("lo", 0))
        for words in ("route add local 0.0.0.0/0 dev lo table local", "-6 route add local ::/0 dev lo table local",
                      "route add default dev lo"):  # fmt: skip
            _ip(words)
        self.networks += 1

    def _listen(self) -> None:
        """Whatever comes within a moment."""
        ready, _, _ = select.select([*self._names, *self._packets], [], [], 0.05)
        for s in ready:
            if s in self._names:
                query, sender = s.recvfrom(4096)
                self.foreign.add(_name(query))
                answer = query[:2] + b"\x81\x83" + query[4:6] + b"\0\0\0\0\0\0" + query[12:]  # no such name
                with contextlib.suppress(OSError):
                    s.sendto(answer, sender)
            else:
                packet, where = s.recvfrom(2048)
                if where[2] == socket.PACKET_OUTGOING and (to := _foreign(packet)):
                    self.foreign.add(to)


def _ip(words: str) -> None:
    """In the namespace that this thread has entered."""
    done = subprocess.run(["ip", *words.split()], capture_output=True, text=True)
    if done.returncode and "-6" not in words:
        raise OSError(f"ip {words}: {done.stderr.strip()}")


class Finder:
    """The pid of a process of this session's sandbox that lives in a network of its own, and in one not found before."""

    def __init__(self, session: str, data_dir: Path):
        self.session, self.data_dir = session, data_dir
        self._known = {os.readlink("/proc/self/ns/net")}

    def __call__(self) -> int | None:
        handles = {p.stem for p in (self.data_dir / "sandboxes").glob("*.json") if self.session in _text(p)}
        if not handles:
            return None
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{pid}/environ", "rb") as f:
                    env = f.read()
                if not any(f"{MARK}={h}\0".encode() in env for h in handles):
                    continue
                # While bubblewrap itself is there, it is still setting the network up, and fails if somebody else does.
                with open(f"/proc/{pid}/comm") as f:
                    if f.read().strip() == "bwrap":
                        continue
                if (network := os.readlink(f"/proc/{pid}/ns/net")) not in self._known:
                    self._known.add(network)
                    return int(pid)
            except OSError:
                continue
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _name(query: bytes) -> str:
    labels, at = [], 12
    while at < len(query) and query[at]:
        labels.append(query[at + 1 : at + 1 + query[at]].decode("ascii", "replace"))
        at += query[at] + 1
    return ".".join(labels) or "?"


def _foreign(packet: bytes) -> str:
    """Where an IP packet goes, if it asks somebody outside: the first of a TCP connection, or a datagram but to a name server,
    which is told by its names."""
    version = packet[0] >> 4 if packet else 0
    if version == 4 and len(packet) >= 28:
        protocol, to, payload = packet[9], packet[16:20], packet[(packet[0] & 15) * 4 :]
        if to[0] == 127:
            return ""
        host = socket.inet_ntop(socket.AF_INET, to)
    elif version == 6 and len(packet) >= 48:
        protocol, to, payload = packet[6], packet[24:40], packet[40:]
        if to == b"\0" * 15 + b"\1" or to[0] == 0xFF:
            return ""
        host = socket.inet_ntop(socket.AF_INET6, to)
    else:
        return ""
    port = struct.unpack("!H", payload[2:4])[0]
    source = struct.unpack("!H", payload[:2])[0]
    if protocol == socket.IPPROTO_TCP and len(payload) >= 14 and payload[13] & 0x12 == 0x02:
        return f"{host}:{port}"
    if protocol == socket.IPPROTO_UDP and port != 53 and source != 53:
        return f"{host}:{port}/udp"
    return ""
