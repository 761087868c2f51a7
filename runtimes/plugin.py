"""What the author of a runtime back-end may import: files as archives, and a far command that can be cancelled."""

from __future__ import annotations

import io
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from polar.errors import InfraError
from polar.sandbox import ExecResult
from runtimes import tree
from runtimes.output import Output

TOP = "x"  # the one common name in an archive
POLL = 0.5  # seconds


def packed(source: Path | bytes, mode: int | None = None) -> bytes:
    """A file, a folder or the bytes of a file as a tar archive in which everything begins with the name `x`. `mode` is for
    the files. Raises InfraError `upload_failed`."""

    def own(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mode = mode if mode is not None and info.isreg() else info.mode & 0o777
        return info

    out = io.BytesIO()
    try:
        with tarfile.open(fileobj=out, mode="w") as tar:
            if isinstance(source, bytes):
                info = tarfile.TarInfo(TOP)
                info.size = len(source)
                tar.addfile(own(info), io.BytesIO(source))
            else:
                tar.add(source, arcname=TOP, filter=own)
    except OSError as e:
        raise InfraError(f"can't read '{source!r}': {e}", code="upload_failed") from e
    return out.getvalue()


def unpacked(archive: bytes, target: Path, limit: int) -> bool:
    """Write such an archive, made by somebody else, at `target`: at most `limit` bytes, nothing outside, no link that leads
    out. True if something was cut. Raises InfraError `artifact_failed`."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            return tree.write_tree(tree.from_tar(tar), target, limit)
    except (OSError, EOFError, tarfile.TarError) as e:
        raise InfraError(f"can't unpack what the sandbox sent: {e}", code="artifact_failed") from e


def run(
    ask: Callable[[], ExecResult],
    stop: Callable[[], None],
    *,
    cancelled: Callable[[], bool] | None = None,
    log: Path | None = None,
    output_limit: int = 64 * 1024,
    log_limit: int = 16 * 1024 * 1024,
) -> ExecResult:
    """The result of `ask()`, which waits for a command elsewhere; `stop()` is called once `cancelled()` says so, and must
    make it return. The output goes where the contract wants it. Raises what `ask` and `stop` raise."""
    found: list[ExecResult | BaseException] = []

    def asking() -> None:
        try:
            found.append(ask())
        except BaseException as e:
            found.append(e)

    thread, stopped = threading.Thread(target=asking, daemon=True), False
    thread.start()
    while thread.is_alive():
        thread.join(POLL)
        if not stopped and thread.is_alive() and cancelled and cancelled():
            stopped = True
            stop()
    (result,) = found
    if isinstance(result, BaseException):
        raise result
    output = Output(output_limit, log, log_limit)
    try:
        output.feed(result.output)
    finally:
        output.close()
    kept = msgspec.structs.replace(result, output=output.tail, output_bytes=max(output.total, result.output_bytes))
    return msgspec.structs.replace(kept, exit_code=None, cancelled=True) if stopped else kept
