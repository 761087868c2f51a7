"""What `runtime.image` may mean to the `apptainer` runtime."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

from msgspec import Struct

from polar.errors import InfraError, UnsupportedSpec

REGISTRIES = ("docker", "oras", "library")
ARCHIVES = ("docker-archive", "oci-archive")
_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(:\d+(?=/))?(/[A-Za-z0-9._-]+)*(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?(@sha256:[0-9a-f]{64})?"
)


class Source(Struct, frozen=True):
    """`kind`: "folder", "sif", "docker-archive", "oci-archive", or "remote" (then `where` is a URI)."""

    kind: str
    where: str

    @property
    def uri(self) -> str:
        return f"{self.kind}:{self.where}" if self.kind in ARCHIVES else self.where


def parse(image: str, shelf: Path, roots: list[str]) -> Source:
    """A path of an image file or an unpacked folder, `docker-archive:PATH`, `docker://NAME`, or a bare name: a file or
    folder of that name on the node's shelf (`:` and `/` as `_`, with or without `.sif`), else `docker://NAME`.

    Paths must lie on the shelf or below one of `roots`: a folder of the host's would else be a task's to read. Raises
    UnsupportedSpec.
    """
    scheme, colon, rest = image.partition(":")
    if scheme in REGISTRIES and rest.startswith("//"):
        if not _NAME.fullmatch(rest[2:]):
            raise UnsupportedSpec(f"runtime.image: '{image}' is not a name of an image in a registry")
        return Source("remote", image)
    if colon and scheme in ARCHIVES:
        return Source(scheme, _allowed(rest, shelf, roots))
    if image.startswith("/"):
        path = _allowed(image, shelf, roots)
        return Source("folder" if os.path.isdir(path) else "sif", path)
    if not _NAME.fullmatch(image):
        raise UnsupportedSpec(
            f"runtime.image: '{image}' is neither a path, nor a name, nor one of "
            f"{', '.join(s + '://…' for s in REGISTRIES)}, {', '.join(s + ':/…' for s in ARCHIVES)}"
        )
    name = re.sub(r"[:/]", "_", image)
    for candidate in (shelf / f"{name}.sif", shelf / name):
        if candidate.exists():
            return Source("folder" if candidate.is_dir() else "sif", str(candidate))
    return Source("remote", f"docker://{image}")


def _allowed(path: str, shelf: Path, roots: list[str]) -> str:
    real = os.path.realpath(path)
    folders = [os.path.realpath(f) for f in (str(shelf), *roots)]
    if not path.startswith("/") or not any(real.startswith(f.rstrip("/") + "/") for f in folders):
        raise UnsupportedSpec(
            f"runtime.image: found '{path}', allowed are paths below {', '.join((str(shelf), *roots))}"
        )
    return real


def digest(source: Source) -> str | None:
    """A name of the content, cheap to tell; None for what only its registry knows. Raises InfraError `image_missing`."""
    try:
        if source.kind == "remote":
            found = re.search(r"@sha256:([0-9a-f]{64})$", source.where)
            return found[1] if found else None
        if source.kind == "sif":
            # Its header holds an identity and the time it was made.
            with open(source.where, "rb") as f:
                head = f.read(1 << 16)
                size = os.fstat(f.fileno()).st_size
            return hashlib.sha256(head + str(size).encode()).hexdigest()
        return hashlib.sha256(_index(source)).hexdigest()
    except (OSError, tarfile.TarError, KeyError) as e:
        raise InfraError(f"image '{source.where}': {e}", code="image_missing", retryable=False) from e


def _index(source: Source) -> bytes:
    with tarfile.open(source.where, "r:*") as tar:
        member = tar.extractfile("manifest.json" if source.kind == "docker-archive" else "index.json")
        return member.read() if member else b""


def configuration(source: Source) -> dict[str, Any]:
    """The image's own settings (`Env`, `WorkingDir` …) where the source tells them; Apptainer keeps only some."""
    if source.kind != "docker-archive":
        return {}
    with tarfile.open(source.where, "r:*") as tar:
        member = tar.extractfile(json.loads(_index(source))[0]["Config"])
        return (json.loads(member.read()) if member else {}).get("config") or {}
