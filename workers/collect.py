"""Artifacts: out of a stopped sandbox into object storage, and back onto a host for evaluation."""

from __future__ import annotations

import hashlib
import logging
import tarfile
from pathlib import Path

from polar.errors import NotFound
from polar.objects import ObjectStore
from polar.result import Artifact, artifact_key
from polar.sandbox import Sandbox
from polar.session import Session
from runtimes.tree import unpack
from workers.report import Collected

# Each archive was bounded when it was collected; this only keeps a sparse one from growing.
RESTORE_LIMIT = 1 << 32
# Bytes kept of the log of one command; one that is cut is as large as this (runtimes/output.py).
LOG_LIMIT = 16 << 20

logger = logging.getLogger("polar.collect")


def collect(
    objects: ObjectStore, sandbox: Sandbox, s: Session, paths: list[str], folder: Path, limit: int
) -> tuple[list[Collected], list[Artifact]]:
    """Keep each sandbox path that exists. `limit` bounds the bytes of each; what is over it, or can't be copied, is cut and
    marked: what the agent leaves at a path is never a failure of ours."""
    collected, artifacts = [], []
    for path in dict.fromkeys(paths):
        name = _name(path)
        local = folder / name
        try:
            truncated = sandbox.download(path, local, limit=limit)
        except NotFound:
            continue
        if not local.exists():  # a pipe, a socket, or what this worker may not read
            local.unlink(missing_ok=True)
            local.touch()
            truncated = True
        is_folder = local.is_dir()
        if is_folder:
            name += ".tar"
            packed = folder / name
            with tarfile.open(packed, "w") as tar:
                tar.add(local, arcname=".")
            local = packed
        key = artifact_key(s.task_id, s.session_id, s.attempt, name)
        objects.put_file(key, local)
        collected.append(Collected(path=path, key=key, folder=is_folder, truncated=truncated))
        artifacts.append(Artifact(name=path, key=key, size=local.stat().st_size, truncated=truncated))
    return collected, artifacts


def keep_baseline(objects: ObjectStore, sandbox: Sandbox, s: Session, under: str) -> None:
    """Remember what lies below `under` before the agent comes."""
    try:
        data = sandbox.baseline(under)
    except NotFound:
        data = b""
    objects.put(_changes_key(s, "baseline"), data)


def keep_changes(
    objects: ObjectStore, sandbox: Sandbox, s: Session, under: str, folder: Path, limit: int
) -> Collected | None:
    """What the agent made of `under`, as one archive; None if there is no such folder."""
    local = folder / "changes.tar"
    try:
        baseline = objects.get(_changes_key(s, "baseline"))
        truncated = sandbox.changes(local, under=under, baseline=baseline, limit=limit)
    except NotFound:
        return None
    key = _changes_key(s, "changes.tar")
    objects.put_file(key, local)
    return Collected(path=under, key=key, truncated=truncated)


def _changes_key(s: Session, name: str) -> str:
    return artifact_key(s.task_id, s.session_id, s.attempt, name)


def keep_log(objects: ObjectStore, s: Session, name: str, path: Path, written: int = 0) -> list[Artifact]:
    """A log on this host, unless it is empty. `written`: the bytes that its command wrote, where that is known."""
    size = path.stat().st_size if path.is_file() else 0
    if not size:
        return []
    key = artifact_key(s.task_id, s.session_id, s.attempt, name)
    objects.put_file(key, path)
    return [Artifact(name=name, key=key, size=size, truncated=written > size or size == LOG_LIMIT)]


def salvage(
    objects: ObjectStore, sandbox: Sandbox, s: Session, log: Path, paths: list[str], folder: Path, limit: int
) -> list[Artifact]:
    """What can be had of an attempt that the machinery failed: the log of its agent, and its files if all processes in the
    sandbox are stopped. Never raises: why it failed must be told whatever happens here. Ends at the first failure: what is
    away now would let every path wait."""
    kept: list[Artifact] = []
    try:
        kept += keep_log(objects, s, log.name, log)
        sandbox.stop()
        folder = folder / "salvage"  # what failed may have left half of a file in the other
        folder.mkdir()
        for path in dict.fromkeys(paths):
            kept += collect(objects, sandbox, s, [path], folder, limit)[1]
    except Exception as e:
        logger.warning("%s: not all could be kept: %s: %s", s.attempt_id, type(e).__name__, e)
    return kept


def restore(objects: ObjectStore, collected: list[Collected], folder: Path) -> dict[str, Path]:
    """Host paths by sandbox path."""
    out = {}
    for i, c in enumerate(collected):
        target = folder / f"{i}-{_name(c.path)}"
        if c.folder:
            packed = target.with_name(target.name + ".tar")
            objects.get_file(c.key, packed)
            # The agent named the members. A trick is left out, not raised: it must not turn a failed attempt into an error of
            # ours.
            unpack(packed, target, RESTORE_LIMIT)
            packed.unlink()
        else:
            objects.get_file(c.key, target)
        out[c.path] = target
    return out


def _name(path: str) -> str:
    """An object name for a sandbox path: readable, unique, one segment."""
    text = "".join(ch if ch.isalnum() or ch in "-_." else "_" for ch in path.strip("/")) or "root"
    return f"{text[-80:].lstrip('.') or 'dot'}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
