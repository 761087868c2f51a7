"""What one call of `exec` runs under, whatever the back-end: its deadline, its caller's wish, its output and its disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict, TypeVar

from polar.errors import InfraError
from polar.sandbox import ExecResult
from runtimes.disk import DiskWatch
from runtimes.output import Output
from runtimes.watch import Watch

Made = TypeVar("Made")
_ATTEMPTS = 3


class Kept(TypedDict, total=False):
    """The words of `Sandbox.exec` that are the same to every back-end."""

    log: Path | None
    output_limit: int
    log_limit: int
    cancelled: Callable[[], bool] | None


class Bounds(NamedTuple):
    watch: Watch
    output: Output
    disk: DiskWatch


class Ended(InfraError):
    """The sandbox ended before the command began: its agent may have killed everything the moment before."""


@contextlib.contextmanager
def bounded(
    timeout: float,
    folder: Path,
    disk: int | None,
    *,
    log: Path | None = None,
    output_limit: int = 64 * 1024,
    log_limit: int = 16 * 1024 * 1024,
    cancelled: Callable[[], bool] | None = None,
) -> Iterator[Bounds]:
    """The time runs from here. At most `disk` bytes in `folder`, where a number is given."""
    watched = DiskWatch(folder, disk, cancelled)
    output = Output(output_limit, log, log_limit)
    try:
        yield Bounds(Watch(timeout, watched if watched.needed else None), output, watched)
    finally:
        output.close()


def shell(argv: list[str] | str, program: str = "/bin/sh") -> list[str]:
    return [program, "-c", argv] if isinstance(argv, str) else argv


def while_ended(run: Callable[[], Made]) -> Made:
    """`run()`, which starts the sandbox anew if it has to; again where that one `Ended` too, a few times."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(Ended):
            return run()
    return run()


def outcome(exit_code: int | None, watch: Watch, output: Output) -> ExecResult:
    """`exit_code` None: `watch` expired."""
    return ExecResult(
        exit_code=exit_code,
        timed_out=watch.timed_out,
        cancelled=watch.was_cancelled,
        output=output.tail,
        output_bytes=output.total,
        seconds=watch.seconds,
    )
