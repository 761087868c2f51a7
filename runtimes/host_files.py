"""Files of a sandbox whose root is a folder of this host: uploads and downloads, with their failures as ours."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

from polar.errors import InfraError, NotFound, PolarError
from runtimes import tree
from runtimes.inroot import Escape, Root

# Where a path of the agent's making leads to nothing that can be read.
_NOWHERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES)


def upload(root: Root, source: Path, path: str, mode: int | None) -> None:
    with _uploading(path):
        if source.is_dir():
            root.put_tree(source, path, mode)
        else:
            with open(source, "rb") as f:
                root.write(path, f, source.stat().st_mode & 0o777 if mode is None else mode)


def write(root: Root, path: str, data: bytes, mode: int) -> None:
    with _uploading(path):
        root.write(path, io.BytesIO(data), mode)


@contextlib.contextmanager
def _uploading(target: str) -> Iterator[None]:
    try:
        yield
    except Escape as e:
        raise InfraError(f"can't write to '{target}': {e.strerror}", code="upload_failed", retryable=False) from e
    except OSError as e:
        raise InfraError(f"can't write to '{target}': {e.strerror or e}", code="upload_failed") from e


def absent(root: Root, path: str) -> PolarError:
    """Why there is nothing at `path`: what a sandbox held that is gone can't be told from nothing."""
    if not os.path.isdir(root.folder):
        return InfraError("the sandbox is gone", code="artifact_failed")
    return NotFound(f"no '{path}' in the sandbox")


def leads_nowhere(e: OSError) -> bool:
    """Is it the path, which the agent may have made so, and not this machine?"""
    return isinstance(e, Escape) or e.errno in _NOWHERE


@contextlib.contextmanager
def reading(root: Root, path: str) -> Iterator[None]:
    """Raises NotFound, InfraError."""
    try:
        yield
    except OSError as e:
        if leads_nowhere(e):
            raise absent(root, path) from e
        raise InfraError(f"can't read '{path}': {e.strerror or e}", code="artifact_failed") from e


def download(root: Root, path: str, target: Path, limit: int) -> bool:
    with reading(root, path), root.locate(path) as (fd, name):
        os.stat(name, dir_fd=fd, follow_symlinks=False)
        try:
            return tree.write_tree(tree.walk(fd, name, device=root.device), target, limit)
        except FileNotFoundError:
            raise
        except OSError as e:  # of this host's side
            raise InfraError(f"can't copy '{path}': {e.strerror or e}", code="artifact_failed") from e
