#!/usr/bin/env python3
"""Make a sandbox base image out of Debian packages that are installed on this host.

For machines that reach no registry, and for CI: takes seconds and no network.

    base_image.py [--tag polar-sandbox:base] [--if-missing] [--ca] [package …]

The image holds the packages with everything they depend on, a user `agent` (1000), and /work. It has no apt. `--ca` adds
this host's certificate bundle. Needs dpkg and a Docker client.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import posixpath
import re
import subprocess
import sys
import tarfile
from pathlib import PurePosixPath
from typing import IO

TAG = "polar-sandbox:base"
PACKAGES = ["bash", "ca-certificates", "coreutils", "dash", "findutils", "git", "grep", "python3", "sed", "tar"]
# Taken along where the host has them.
HANDY = [
    "debianutils",
    "diffutils",
    "gzip",
    "hostname",
    "libc-bin",
    "mawk",
    "patch",
    "procps",
    "python3-venv",
    "util-linux",
]
MERGED = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")  # since Debian 12 links into /usr
UNWANTED = re.compile(
    r"^/usr/share/(man|doc|doc-base|info|locale|lintian|linda|bug|zoneinfo|bash-completion)/|/__pycache__(/|$)"
)
NOT_COPIED = ("/dev", "/proc", "/sys", "/tmp", "/run", "/work", "/home", "/root", "/var/log", "/var/cache")
PASSWD = "root:x:0:0:root:/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\nnobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n"
GROUP = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"
CA = "/etc/ssl/certs/ca-certificates.crt"


def installed() -> tuple[dict[str, list[list[str]]], dict[str, str]]:
    """Dependencies of each installed package (a list of alternatives each), and who provides a virtual one."""
    form = "${Package}\t${db:Status-Status}\t${Provides}\t${Pre-Depends}, ${Depends}\n"
    listing = subprocess.run(["dpkg-query", "-W", "-f", form], capture_output=True, text=True, check=True).stdout
    needs: dict[str, list[list[str]]] = {}
    provider: dict[str, str] = {}
    for line in listing.splitlines():
        name, status, provides, depends = line.split("\t")
        if status != "installed":
            continue
        needs[name] = [[_bare(a) for a in group.split("|")] for group in depends.split(",") if group.strip()]
        for virtual in filter(None, (_bare(p) for p in provides.split(","))):
            provider.setdefault(virtual, name)
    return needs, provider


def _bare(word: str) -> str:
    """`libc6:any (>= 2.36)` is `libc6`."""
    return re.split(r"[\s(:]", word.strip(), maxsplit=1)[0]


def closure(wanted: list[str]) -> set[str]:
    needs, provider = installed()
    missing = [p for p in wanted if p not in needs and p not in provider]
    if missing:
        sys.exit(f"not installed on this host: {', '.join(missing)}")
    found: set[str] = set()
    todo = list(wanted)
    while todo:
        name = todo.pop()
        name = name if name in needs else provider.get(name, "")
        if not name or name in found:
            continue
        found.add(name)
        for group in needs[name]:
            todo += [a for a in group if a in needs or a in provider][:1]
    return found


def paths_of(packages: set[str]) -> set[str]:
    """Absolute paths, parents before children when sorted, all below /usr where Debian merged them."""
    listing = subprocess.run(["dpkg-query", "-L", *sorted(packages)], capture_output=True, text=True).stdout
    paths = set()
    for line in listing.splitlines():
        if not line.startswith("/") or line == "/.":
            continue
        for folder in MERGED:
            if line.startswith(folder + "/") and os.path.islink(folder):
                line = "/usr" + line
        paths.add(line)
    merged = {m for m in MERGED if os.path.islink(m)}
    # Made by scripts at installation, so in no package's list.
    extra = {"/usr/bin/sh", "/etc/ld.so.cache", "/etc/nsswitch.conf", "/usr/local/bin", *merged}
    kept = {p for p in paths | extra if not UNWANTED.search(p) and not p.startswith(NOT_COPIED)}
    return kept | {str(parent) for p in kept for parent in PurePosixPath(p).parents}


def with_alternatives(paths: set[str]) -> set[str]:
    """Add links such as /usr/bin/awk → /etc/alternatives/awk → /usr/bin/mawk, whose end is in `paths`."""
    out = set(paths)
    folder = "/etc/alternatives"
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
        link = posixpath.join(folder, name)
        if os.path.islink(link) and os.readlink(link) in paths:
            out.add(link)
            user = posixpath.join("/usr/bin", name)
            if os.path.islink(user) and os.readlink(user) == link:
                out.add(user)
    return out


def with_bytecode(paths: set[str]) -> set[str]:
    """Add what Python compiled at installation: a container would compile it anew in each sandbox."""
    out = set(paths)
    for path in paths:
        folder, name = posixpath.split(path)
        cache = posixpath.join(folder, "__pycache__")
        if name.endswith(".py") and os.path.isdir(cache):
            found = glob.glob(posixpath.join(glob.escape(cache), glob.escape(name[:-3]) + ".cpython-*.pyc"))
            out |= {cache, *found} if found else set()
    return out


def write(stream: IO[bytes], paths: set[str], ca: bool) -> None:
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        for path in sorted(paths - {"/"}):
            if os.path.lexists(path) and path not in ("/etc/passwd", "/etc/group", "/etc/shadow", "/etc/gshadow", CA):
                tar.add(path, arcname=path.lstrip("/"), recursive=False, filter=_plain)
        for path, mode, uid in (
            ("work", 0o755, 0),
            ("root", 0o700, 0),
            ("home", 0o755, 0),
            ("home/agent", 0o755, 1000),
            ("tmp", 0o1777, 0),
        ):
            info = tarfile.TarInfo(path)
            info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, uid, uid
            tar.addfile(info)
        for path, text in (("etc/passwd", PASSWD), ("etc/group", GROUP)):
            _add(tar, path, text.encode())
        if ca and os.path.exists(CA):
            with open(CA, "rb") as f:
                _add(tar, CA.lstrip("/"), f.read())


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
        return None
    info.mode &= 0o1777  # no set-uid programs: sandboxes may not gain privileges
    return info


def _add(tar: tarfile.TarFile, path: str, data: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(data), 0o644
    tar.addfile(info, io.BytesIO(data))


def build(tag: str, packages: list[str], ca: bool = False, docker: str = "docker") -> None:
    """Make the image. Raises SystemExit with a message."""
    paths = with_bytecode(with_alternatives(paths_of(closure(packages))))
    changes = [
        "ENV PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "ENV LANG=C.UTF-8",
        "WORKDIR /work",
        'CMD ["/bin/bash"]',
    ]
    argv = [docker, "import", *(w for c in changes for w in ("--change", c)), "-", tag]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    try:
        write(process.stdin, paths, ca)
    except BrokenPipeError:
        pass
    finally:
        try:
            process.stdin.close()
        except BrokenPipeError:
            pass
    process.stdin = None
    out = process.communicate()[0].decode().strip()
    if process.returncode:
        sys.exit(f"{' '.join(argv[:2])} failed")
    print(f"{tag}: {out}, {len(paths)} paths")


def exists(tag: str, docker: str = "docker") -> bool:
    return subprocess.run([docker, "image", "inspect", tag], capture_output=True).returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", help=f"default: {' '.join(PACKAGES)}")
    parser.add_argument("--tag", default=TAG)
    parser.add_argument("--if-missing", action="store_true", help="do nothing if the image is there")
    parser.add_argument("--ca", action="store_true", help="add this host's certificate bundle")
    parser.add_argument("--docker", default="docker", help="the client to use")
    a = parser.parse_args()
    if a.if_missing and exists(a.tag, a.docker):
        return
    build(a.tag, a.packages or [*PACKAGES, *(p for p in HANDY if p in installed()[0])], a.ca, a.docker)


if __name__ == "__main__":
    main()
