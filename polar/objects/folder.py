"""Objects as files under one folder.

A write goes to a temporary file, is synced, and takes its name by rename (or by link, for create-only), then the folder
is synced. Each segment is percent-encoded and the leaf carries a suffix, so that `a` and `a/b` are a file and a folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from polar.errors import NotFound, PolarError
from polar.objects.base import check_key

_LEAF = ".obj"
_TMP = ".tmp"


class FolderStore:
    def __init__(self, root: Path):
        self.root = root
        try:
            (root / _TMP).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise PolarError(f"object folder {root}: {e}", code="store_unavailable") from e

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, replace=True)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._write(key, data, replace=False)

    def put_file(self, key: str, path: Path) -> None:
        self._write(key, path, replace=True)

    def get(self, key: str) -> bytes:
        with _reading(key):
            return self._path(key).read_bytes()

    def get_file(self, key: str, path: Path) -> None:
        with _reading(key):
            source = self._path(key).open("rb")
        with source, path.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)

    def exists(self, key: str) -> bool:
        return self._path(key).is_file()

    def list(self, prefix: str = "") -> Iterator[str]:
        # Walk only the folder that the prefix's complete segments name.
        base = self.root.joinpath(*map(_enc, prefix.split("/")[:-1])) if "/" in prefix else self.root
        keys = []
        for folder, dirs, files in os.walk(base):
            if Path(folder) == self.root:
                dirs[:] = [d for d in dirs if d != _TMP]
            rel = Path(folder).relative_to(self.root).parts
            keys += ["/".join([*map(unquote, rel), unquote(f[: -len(_LEAF)])]) for f in files if f.endswith(_LEAF)]
        return iter(sorted(k for k in keys if k.startswith(prefix)))

    def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
            _sync(path.parent)

    def _path(self, key: str) -> Path:
        *parents, leaf = map(_enc, check_key(key).split("/"))
        return self.root.joinpath(*parents, leaf + _LEAF)

    def _write(self, key: str, data: bytes | Path, *, replace: bool) -> bool:
        path = self._path(key)
        try:
            missing = [p for p in [path.parent, *path.parent.parents] if not p.exists()]
            path.parent.mkdir(parents=True, exist_ok=True)
            for p in missing:
                _sync(p.parent)
            fd, tmp = tempfile.mkstemp(dir=self.root / _TMP)
            try:
                with os.fdopen(fd, "wb") as f:
                    if isinstance(data, Path):
                        with data.open("rb") as src:
                            shutil.copyfileobj(src, f, 1 << 20)
                    else:
                        f.write(data)
                    f.flush()
                    os.fdatasync(f.fileno())
                if replace:
                    os.replace(tmp, path)
                else:
                    try:
                        os.link(tmp, path)
                    except FileExistsError:
                        return False
                _sync(path.parent)
                return True
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(tmp)
        except OSError as e:
            raise PolarError(f"object '{key}': {e}", code="store_unavailable", retryable=True) from e


def _enc(segment: str) -> str:
    # A leading dot is escaped too: it keeps keys apart from our own temporary folder.
    text = quote(segment, safe="-_.~ +=@,")
    return "%2E" + text[1:] if text.startswith(".") else text


@contextlib.contextmanager
def _reading(key: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as e:
        raise NotFound(f"no object '{key}'") from e
    except OSError as e:
        raise PolarError(f"object '{key}': {e}", code="store_unavailable", retryable=True) from e


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
