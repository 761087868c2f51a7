"""Local sources of prepare steps become objects, so that any node can fetch them."""

from __future__ import annotations

import hashlib
import io
import tarfile
from pathlib import Path

import msgspec

from polar.errors import InvalidTask
from polar.objects import ObjectStore
from polar.task import Prepare, RuntimeSpec, TaskRequest, UploadDir, UploadFile

SCHEME = "object://"


def upload_sources(task: TaskRequest, objects: ObjectStore, base: Path | None) -> TaskRequest:
    """The task with every local source replaced by `object://uploads/<sha256>`. Relative paths are taken from `base`;
    with `base` None (a task from the network) local sources are refused."""
    runtime = _spec(task.runtime, objects, base, "runtime")
    evaluator = task.evaluator
    if evaluator and evaluator.runtime:
        evaluator = msgspec.structs.replace(
            evaluator, runtime=_spec(evaluator.runtime, objects, base, "evaluator.runtime")
        )
    return msgspec.structs.replace(task, runtime=runtime, evaluator=evaluator)


def _spec(spec: RuntimeSpec, objects: ObjectStore, base: Path | None, where: str) -> RuntimeSpec:
    changes = {}
    for name in ("prepare", "evaluation_prepare"):
        actions = getattr(spec, name)
        if actions is not None:
            changes[name] = [_action(a, objects, base, f"{where}.{name}[{i}]") for i, a in enumerate(actions)]
    return msgspec.structs.replace(spec, **changes)


def _action(action: Prepare, objects: ObjectStore, base: Path | None, where: str) -> Prepare:
    if not isinstance(action, UploadFile | UploadDir) or not action.source or action.source.startswith(SCHEME):
        return action
    if base is None:
        raise InvalidTask(
            f"{where}.source: found '{action.source}', allowed over the network: 'object://…' (or 'content')"
        )
    path = base / action.source
    folder = isinstance(action, UploadDir)
    if not (path.is_dir() if folder else path.is_file()):
        raise InvalidTask(f"{where}.source: no such {'folder' if folder else 'file'}: {path}")
    data = _tar(path) if folder else path.read_bytes()
    key = f"uploads/{hashlib.sha256(data).hexdigest()}{'.tar' if folder else ''}"
    objects.put_if_absent(key, data)
    return msgspec.structs.replace(action, source=SCHEME + key)


def _tar(folder: Path) -> bytes:
    """The same folder gives the same bytes: names sorted, times and owners left out."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path in sorted(folder.rglob("*")):
            info = tar.gettarinfo(path, arcname=str(path.relative_to(folder)))
            info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
            if info.isreg():
                with path.open("rb") as f:
                    tar.addfile(info, f)
            else:
                tar.addfile(info)
    return out.getvalue()
