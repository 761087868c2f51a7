"""The copy-on-write root of a local sandbox: what lies where on the host, and what its holder mounts.

`fs` is the sandbox's root. Over its places `usr`, `etc` … lie overlays: the machine's own folder below (for /etc with the
secrets replaced by empty files), the sandbox's changes in `upper/usr` …. What the machine has mounted inside these folders
is seen read-only; an overlay doesn't reach into it.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from runtimes import bwrap, local_owned, overlay_upper
from runtimes.holder import Impossible, Mount
from runtimes.local_box import Record

# Made anew for each command.
OWN = ("/proc", "/dev", "/run", "/sys")
_FOLDERS = (
    "home", "proc", "dev", "run", "sys", "tmp", "var/cache", "var/lib", "var/log", "var/spool", "var/tmp",
)  # fmt: skip


def folders() -> list[str]:
    """The machine's folders that a sandbox has a copy of."""
    return [p for p in (*bwrap.SYSTEM, *bwrap.PACKAGES) if os.path.isdir(p) and not os.path.islink(p)]


def links() -> dict[str, str]:
    """The machine's links beside them (/bin), by name."""
    return {p.strip("/"): os.readlink(p) for p in bwrap.SYSTEM if os.path.islink(p)}


def writable(data_dir: Path) -> list[str]:
    """Those that can be changed inside: a folder that holds this deployment's own data can't be a layer of it."""
    return [p for p in folders() if not bwrap.under(str(data_dir), (p,))]


def make(folder: Path, data_dir: Path) -> None:
    """What the holder mounts on, of a sandbox whose other folders exist. Raises Impossible, OSError."""
    root = folder / "fs"
    for name in _FOLDERS:
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (root / name).chmod(0o1777)
    for name, target in links().items():
        (root / name).symlink_to(target)
    (root / "var" / "run").symlink_to("/run")
    (root / "var" / "lock").symlink_to("/run/lock")
    for path in writable(data_dir):
        for kind in ("upper", "work"):
            (folder / kind / path.strip("/")).mkdir(parents=True)
        # Attributes of a merged folder are the uppermost's.
        os.chmod(folder / "upper" / path.strip("/"), os.stat(path).st_mode & 0o777 | 0o700)
    (folder / "empty").mkdir()
    (folder / "nothing").touch()
    _mask(folder / "mask", bwrap.secrets(str(data_dir)))


def _mask(mask: Path, secrets: tuple[str, ...]) -> None:
    """A layer in which the machine's secrets are empty. Raises Impossible, OSError."""
    mask.mkdir()
    for path in secrets:
        place = mask / path.strip("/")
        if not os.path.lexists(path):
            continue
        _folder_above(mask, path)
        if os.path.isdir(path):
            place.mkdir(exist_ok=True)
            try:
                os.setxattr(place, "user.overlay.opaque", b"y")
            except OSError as e:
                raise Impossible(f"the file system of '{mask}' keeps no attributes: {e.strerror}") from e
        else:
            place.touch(0o640)


def _folder_above(mask: Path, path: str) -> None:
    """With the attributes of the machine's: a merged folder has those of its uppermost layer."""
    for above in list(PurePosixPath(path).parents)[-2::-1]:
        if not (place := mask / str(above).strip("/")).is_dir():
            info = os.stat(above)
            place.mkdir()
            if os.geteuid() == 0:
                os.chown(place, info.st_uid, info.st_gid)
            place.chmod(info.st_mode & 0o7777 | 0o700)


def masked(folder: Path) -> tuple[str, ...]:
    """What of the machine's this sandbox sees empty. Raises OSError."""
    with overlay_upper.opened(folder / "mask", "") as fd:
        found = overlay_upper.scan(fd) if fd is not None else ()
        return tuple(f"/{f.path}" for f in found if f.hides)


def mounts(record: Record, folder: Path, data_dir: Path) -> list[Mount]:
    """In their order. Raises Impossible, OSError."""
    can_change = writable(data_dir)
    inner = mounted_below(tuple(can_change))
    if inner and os.geteuid() != 0:
        raise Impossible(f"something is mounted at '{inner[0]}', and only root can make an overlay over that")
    owned = local_owned.find(data_dir, tuple(can_change))
    out = []
    for path in can_change:
        place = path.strip("/")
        layers = [f"mask/{place}"] if (folder / "mask" / place).is_dir() else []
        # Relative, as the holder stands there: the kernel's list knows no colons in names.
        layers += [os.path.relpath(owned / place, folder)] if owned else []
        out.append(Mount(place, ":".join([*layers, path]), overlay=True))
    secrets = bwrap.secrets(str(data_dir))
    inner = [p for p in inner if not bwrap.under(p, secrets)]
    others = [p for p in folders() if p not in can_change] + inner
    others += [*bwrap.python(), *bwrap.environment(_taken(record))]
    if record.network == "internet" and (real := bwrap.resolver()) and not bwrap.under(real, OWN):
        others.append(real)
    out += [Mount(p.strip("/"), p) for p in sorted(set(others))]
    for path in (*secrets, str(data_dir)):
        if bwrap.under(path, tuple(others)) and os.path.exists(path):
            out.append(Mount(path.strip("/"), str(folder / ("empty" if os.path.isdir(path) else "nothing"))))
    return out + [Mount(v.target.strip("/"), v.source) for v in sorted(record.volumes, key=lambda v: v.target)]


def bound(record: Record, folder: Path, data_dir: Path) -> tuple[str, ...]:
    """Where something read-only is mounted. Raises OSError."""
    return tuple(f"/{m.place}" for m in mounts(record, folder, data_dir) if not m.overlay)


def _taken(record: Record) -> list[str]:
    return [*record.mounts, *(v.target for v in record.volumes)]


def mounted_below(folders: tuple[str, ...]) -> list[str]:
    """Places inside `folders` where this machine has something else mounted."""
    out = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as f:
        for line in f:
            path = _plain(line.split(" ")[4])
            if path not in folders and bwrap.under(path, folders):
                out.append(path)
    # A mount carries with it what is mounted below.
    return [p for p in dict.fromkeys(out) if os.access(p, os.R_OK) and not bwrap.under(os.path.dirname(p), tuple(out))]


def _plain(path: str) -> str:
    """As the kernel writes it: blanks and such as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path
