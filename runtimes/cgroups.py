"""Control groups of this host: limits on what all processes of a sandbox use together.

Version 2 where a subtree was delegated to this user (systemd: `Delegate=yes`) or this process is root; version 1 as root.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from functools import cache
from pathlib import Path

from msgspec import Struct

from polar.errors import InfraError

NEEDED = ("cpu", "memory", "pids")
ROOT = Path("/sys/fs/cgroup")
VARIABLE = "POLAR_CGROUP"  # "delegated" says so where no systemd can be asked
HOST_GROUP = "polar-host"  # where this deployment's own processes move to: a group with subgroups may hold none
PREFIX = "polar-box-"
_PERIOD = 100_000


class Limits(Struct, frozen=True, kw_only=True):
    """`cpus` in processors, `memory` in bytes (swap included), `pids` processes and threads."""

    cpus: float | None = None
    memory: int | None = None
    pids: int | None = None


class Cgroups:
    """Groups below `bases`: one folder on version 2, one per controller on version 1."""

    def __init__(self, version: int, bases: dict[str, Path]):
        self.version = version
        self._bases = bases

    def _folders(self, name: str) -> list[Path]:
        return [base / (PREFIX + name) for base in dict.fromkeys(self._bases.values())]

    def make(self, name: str, limits: Limits) -> None:
        """Nothing to do where it exists. Raises OSError; a group half-made is for `remove`."""
        folders = self._folders(name)
        if all(f.is_dir() for f in folders):
            return
        for folder in folders:
            folder.mkdir(exist_ok=True)
        for file, value in self._settings(name, limits):
            file.write_text(str(value))

    def _settings(self, name: str, limits: Limits) -> list[tuple[Path, object]]:
        at = {c: base / (PREFIX + name) for c, base in self._bases.items()}
        out: list[tuple[Path, object]] = []
        if self.version == 2:
            if limits.memory:
                out.append((at["memory"] / "memory.max", limits.memory))
                if (at["memory"] / "memory.swap.max").exists():
                    out.append((at["memory"] / "memory.swap.max", 0))
                out.append((at["memory"] / "memory.oom.group", 0))
            if limits.cpus:
                out.append((at["cpu"] / "cpu.max", f"{max(1000, int(limits.cpus * _PERIOD))} {_PERIOD}"))
        else:
            if limits.memory:
                out.append((at["memory"] / "memory.limit_in_bytes", limits.memory))
                if (at["memory"] / "memory.memsw.limit_in_bytes").exists():
                    out.append((at["memory"] / "memory.memsw.limit_in_bytes", limits.memory))
            if limits.cpus:
                out.append((at["cpu"] / "cpu.cfs_period_us", _PERIOD))
                out.append((at["cpu"] / "cpu.cfs_quota_us", max(1000, int(limits.cpus * _PERIOD))))
        if limits.pids:
            out.append((at["pids"] / "pids.max", limits.pids))
        return out

    def entering(self, name: str, argv: list[str]) -> list[str]:
        """`argv` behind a shell that first moves itself into the group, so that nothing runs outside of it."""
        files = [str(f / "cgroup.procs") for f in self._folders(name)]
        return ["/bin/sh", "-c", _ENTER, "sh", str(len(files)), *files, *argv]

    def members(self, name: str) -> set[int]:
        out = set()
        for folder in self._folders(name):
            for at, _, _ in os.walk(folder):
                with contextlib.suppress(OSError):
                    out |= {int(p) for p in Path(at, "cgroup.procs").read_text().split()}
        return out

    def kill(self, name: str) -> None:
        """Everything in it at once, where the kernel can (version 2 since 5.14): no fork is faster than that."""
        for folder in self._folders(name):
            with contextlib.suppress(OSError):
                fd = os.open(folder / "cgroup.kill", os.O_WRONLY)  # never made where it isn't the kernel's
                try:
                    os.write(fd, b"1")
                finally:
                    os.close(fd)

    def remove(self, name: str, timeout: float = 5.0) -> None:
        """Its processes must have been killed; what came meanwhile is, where `kill` works, and what a plain process made
        below goes with it. Raises OSError if it stays."""
        deadline = time.monotonic() + timeout
        for folder in self._folders(name):
            while folder.is_dir():
                self.kill(name)
                try:
                    for below, _, _ in os.walk(folder, topdown=False):
                        os.rmdir(below)
                except FileNotFoundError:
                    pass
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.01)  # the kernel lets go of a killed process a little later

    def forget(self, older: float = 3600.0) -> None:
        """Remove empty groups that were made long ago: of sandboxes whose records are lost, mostly. One that is still in
        use is made again when a command needs it."""
        for base in dict.fromkeys(self._bases.values()):
            for folder in base.glob(PREFIX + "*"):
                with contextlib.suppress(OSError):
                    if time.time() - folder.stat().st_mtime > older:
                        folder.rmdir()

    def names(self) -> set[str]:
        """Every sandbox that has a group here."""
        return {
            p.name.removeprefix(PREFIX)
            for base in self._bases.values()
            if base.is_dir()
            for p in base.glob(PREFIX + "*")
        }


class Group:
    """The group of one sandbox; where there can be none (`groups` says why), nothing happens."""

    def __init__(self, groups: Cgroups | str, name: str, limits: Limits):
        self._groups = groups if isinstance(groups, Cgroups) else None
        self._name, self._limits = name, limits

    def make(self) -> None:
        """Raises OSError."""
        if self._groups:
            self._groups.make(self._name, self._limits)

    def again(self) -> None:
        """If it was swept away meanwhile. Raises InfraError."""
        try:
            self.make()
        except OSError as e:
            raise InfraError(f"no control group for sandbox '{self._name}': {e}", code="exec_failed") from e

    def entering(self, argv: list[str]) -> list[str]:
        return self._groups.entering(self._name, argv) if self._groups else argv

    def members(self) -> set[int]:
        return self._groups.members(self._name) if self._groups else set()

    def kill(self) -> None:
        if self._groups:
            self._groups.kill(self._name)

    def remove(self) -> None:
        """Raises OSError."""
        if self._groups:
            self._groups.remove(self._name)


_ENTER = (
    'n=$1; shift; while [ "$n" -gt 0 ]; do echo $$ >"$1" || { echo "no control group: $1" >&2; exit 125; }; '
    'shift; n=$((n-1)); done; exec "$@"'
)


@cache
def find(root: Path = ROOT) -> Cgroups | str:
    """Where this process may make groups, or why it can't. Once per process: it may move this deployment's own processes
    into a group of their own."""
    found = _version2(root, own_group()) if (root / "cgroup.controllers").exists() else _version1(root)
    if isinstance(found, Cgroups):
        found.forget()
    return found


def own_group() -> str:
    """This process's group of version 2, as a path below the mount."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return line[3:].lstrip("/")
    return ""


def _version1(root: Path) -> Cgroups | str:
    bases = {}
    for controller in NEEDED:
        top = root / controller
        if not top.is_dir():
            return f"no control group controller '{controller}' on this machine"
        base = top / "polar"
        try:
            base.mkdir(exist_ok=True)
        except OSError as e:
            return f"control groups (version 1) need root: {e.strerror}"
        if not os.access(base, os.W_OK):
            return "control groups (version 1) need root"
        bases[controller] = base
    return Cgroups(1, bases)


def _version2(root: Path, own: str) -> Cgroups | str:
    base = root / own
    if base.name == HOST_GROUP:
        base = base.parent
    writable = os.access(base / "cgroup.subtree_control", os.W_OK)
    # A group that is merely writable (a terminal's) holds others' processes, which aren't ours to move.
    if os.geteuid() == 0 and not _delegated(root, base):
        if missing := _missing(root):
            return f"this machine's kernel has no control group controllers {missing}"
        base = root / "polar"
        try:
            base.mkdir(exist_ok=True)
            if (root / "cgroup.type").exists():
                _empty(root)  # the top of a container: unlike the machine's, it may not hold processes besides groups
            _enable(root)
        except OSError as e:
            return f"control groups can't be made below {root}: {e.strerror}"
    elif not writable or not (os.environ.get(VARIABLE) == "delegated" or _delegated(root, base)):
        return "no control groups are delegated to this user (systemd: Delegate=yes, or systemd-run --user --scope -p Delegate=yes)"
    if missing := _missing(base):
        return f"control group controllers not delegated to this user: {missing}"
    try:
        _empty(base)
        _enable(base)
    except OSError as e:
        return f"control groups can't be made below {base}: {e.strerror}"
    return Cgroups(2, dict.fromkeys(NEEDED, base))


def _missing(base: Path) -> str:
    return ", ".join(sorted(set(NEEDED) - set((base / "cgroup.controllers").read_text().split())))


def _delegated(root: Path, base: Path) -> bool:
    for name in ("trusted.delegate", "user.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(base, name) == b"1":
                return True
    return base.suffix in (".scope", ".service") and _systemd_says(root, base)


def _systemd_says(root: Path, base: Path) -> bool:
    """Whether the unit whose group this is was delegated. A user's systemd marks no group (252), and what the machine's
    marked before 251 only root can read."""
    users = any(part.startswith("user@") for part in base.parts[:-1])
    argv = ["systemctl", *(["--user"] if users else []), "show", "--property=Delegate,ControlGroup", "--", base.name]
    env = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
    try:
        done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return {"Delegate=yes", f"ControlGroup=/{base.relative_to(root)}"} <= set(done.stdout.splitlines())


def _empty(base: Path) -> None:
    """Move this deployment's processes out of `base` into a leaf. Another process may do the same at once."""
    leaf = base / HOST_GROUP
    for _ in range(100):
        pids = (base / "cgroup.procs").read_text().split()
        if not pids:
            return
        leaf.mkdir(exist_ok=True)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                (leaf / "cgroup.procs").write_text(pid)
    raise OSError(16, "processes keep coming")


def _enable(folder: Path) -> None:
    file = folder / "cgroup.subtree_control"
    wanted = set(NEEDED) - set(file.read_text().split())
    if wanted:
        file.write_text(" ".join(f"+{c}" for c in sorted(wanted)))
