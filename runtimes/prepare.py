"""Executing a task's prepare steps in a fresh sandbox."""

from __future__ import annotations

import lzma
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from polar.errors import InfraError, NotFound, PolarError
from polar.sandbox import Sandbox
from polar.task import Exec, Prepare, UploadDir, UploadFile
from runtimes.tree import unpack

ARCHIVE_LIMIT = 8 << 30  # bytes that an uploaded archive may unpack to
LINES = 5  # of a failed command's output in the error message


@runtime_checkable
class Keeping(Protocol):
    """A sandbox of a back-end that can keep what preparation led to, for the next one."""

    def is_prepared(self, steps: list[Prepare]) -> bool: ...

    def keep_prepared(self, steps: list[Prepare]) -> None: ...


def run_prepare(
    sandbox: Sandbox,
    actions: list[Prepare],
    *,
    timeout: float,
    fetch: Callable[[str], Path],
    cancelled: Callable[[], bool] | None = None,
) -> None:
    """Run `actions` in order within `timeout` seconds, each up to its `max_attempts`. `fetch` turns a source (host path
    or `object://` key) into a host path. Raises InfraError `prepare_failed` that names the step."""
    deadline = time.monotonic() + timeout
    if isinstance(sandbox, Keeping) and sandbox.is_prepared(actions):
        return
    for i, action in enumerate(actions):
        what = f"prepare[{i}] ({_describe(action)})"
        for attempt in range(1, action.max_attempts + 1):
            if time.monotonic() >= deadline:
                raise _failed(f"{what}: no time left")
            try:
                _run(sandbox, action, deadline, fetch, cancelled)
                break
            except (PolarError, OSError) as e:
                stopped = cancelled is not None and cancelled()
                last = attempt == action.max_attempts or not getattr(e, "retryable", True)
                if last or stopped or not _pause(action.retry_backoff_seconds, deadline, cancelled):
                    tries = f" (attempt {attempt} of {action.max_attempts})" if action.max_attempts > 1 else ""
                    raise _failed(f"{what}{tries}: {e}", retryable=getattr(e, "retryable", True)) from e

    if actions and isinstance(sandbox, Keeping):
        sandbox.keep_prepared(actions)


def _run(
    sandbox: Sandbox,
    action: Prepare,
    deadline: float,
    fetch: Callable[[str], Path],
    cancelled: Callable[[], bool] | None,
) -> None:
    if isinstance(action, Exec):
        left = max(0.01, deadline - time.monotonic())
        bound = min(left, action.timeout_seconds or left)
        result = sandbox.exec(action.command, env=action.env, cwd=action.cwd, timeout=bound, cancelled=cancelled)
        if result.exit_code != 0:
            if result.cancelled:
                how = "cancelled"
            elif result.timed_out:
                how = f"killed after {bound:.0f} s"
            else:
                how = f"exit code {result.exit_code}"
            tail = result.output.decode("utf-8", "replace").strip().splitlines()[-LINES:]
            raise _failed(f"{how}: {' | '.join(tail) or 'no output'}")
    elif isinstance(action, UploadDir):
        source = _fetched(fetch, action.source)
        if source.is_dir():
            sandbox.upload(source, action.target)
            return
        with tempfile.TemporaryDirectory(prefix="polar-upload-") as temp:
            folder = Path(temp) / "tree"
            try:
                cut = unpack(source, folder, ARCHIVE_LIMIT)
            except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as e:
                raise _failed(f"'{action.source}' is no tar archive: {str(e).splitlines()[0]}", retryable=False) from e
            if cut:
                raise _failed("the archive is too large, or holds something that may not be unpacked", retryable=False)
            sandbox.upload(folder, action.target)
    elif action.content is not None:
        sandbox.write(action.target, action.content.encode(), mode=action.mode)
    else:
        sandbox.upload(_fetched(fetch, action.source or ""), action.target, mode=action.mode)


def _fetched(fetch: Callable[[str], Path], source: str) -> Path:
    try:
        path = fetch(source)
    except NotFound as e:
        raise _failed(e.message, retryable=False) from e
    if not path.exists():
        raise _failed(f"source '{source}' doesn't exist", retryable=False)
    return path


def _pause(seconds: float, deadline: float, cancelled: Callable[[], bool] | None) -> bool:
    """Wait before the next attempt; False if there is no point in one."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if until >= deadline or (cancelled and cancelled()):
            return False
        time.sleep(min(left, 0.25))
    return True


def _describe(action: Prepare) -> str:
    if isinstance(action, Exec):
        text = " ".join(action.command.split())
        return f"exec: {text if len(text) <= 80 else text[:77] + '…'}"
    kind = "upload_file" if isinstance(action, UploadFile) else "upload_dir"
    return f"{kind} to {action.target}"


def _failed(message: str, retryable: bool = True) -> InfraError:
    return InfraError(message, code="prepare_failed", stage="init", retryable=retryable)
