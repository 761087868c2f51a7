"""The interface, and the URL that picks a back-end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from polar.errors import InvalidConfig, PolarError


class ObjectStore(Protocol):
    """Keys are `/`-separated, non-empty segments; `a` and `a/b` may both exist. Objects appear whole or not at all,
    and are durable when `put` returns. Failures of the service raise PolarError `store_unavailable` (retryable)."""

    def put(self, key: str, data: bytes) -> None:
        """Write or overwrite."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Write only if there is no such key; of concurrent writers exactly one gets True."""
        ...

    def put_file(self, key: str, path: Path) -> None: ...

    def get(self, key: str) -> bytes:
        """Raises NotFound."""
        ...

    def get_file(self, key: str, path: Path) -> None: ...

    def exists(self, key: str) -> bool: ...

    def list(self, prefix: str = "") -> Iterator[str]:
        """Keys that start with `prefix`, in ascending order."""
        ...

    def delete(self, key: str) -> None:
        """Idempotent."""
        ...


def check_key(key: str) -> str:
    if (
        not key
        or key.startswith("/")
        or any(s in ("", ".", "..") for s in key.split("/"))
        or "\x00" in key
        or "\\" in key
    ):
        # A backslash is a separator to some servers.
        raise PolarError(
            f"object key {key!r}: segments must be non-empty, not '.' or '..', without backslash", code="invalid_key"
        )
    return key


def open_objects(url: str) -> ObjectStore:
    """file:///folder, or s3://bucket[/prefix]?endpoint=http://host:port[&region=…][&create=1]."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        from polar.objects.folder import FolderStore

        if parts.netloc or not parts.path.startswith("/"):
            raise InvalidConfig(f"objects URL '{url}': a folder needs an absolute path, as in file:///var/lib/polar")
        return FolderStore(Path(parts.path))
    if parts.scheme == "s3":
        from polar.objects.s3 import S3Store

        return S3Store.from_url(url)
    raise InvalidConfig(f"objects URL '{url}': unknown scheme '{parts.scheme}'; allowed: file, s3")
