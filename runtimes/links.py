"""Links on the way to a path of a sandbox, taken by the host: a change is told by the place where it lies."""

from __future__ import annotations

from collections.abc import Callable

from runtimes.inroot import MAX_LINKS


def resolved(path: str, readlink: Callable[[str], str | None]) -> str:
    """The absolute `path` without links and steps upward, which end at the root. `readlink` says where the link at such a
    path leads; None if it is none. Raises NotADirectoryError for a circle."""
    todo, links = path.split("/")[::-1], 0
    done: list[str] = []
    while todo:
        part = todo.pop()
        if part in ("", "."):
            continue
        if part == "..":
            done = done[:-1]
            continue
        target = readlink("/" + "/".join([*done, part]))
        if target is None:
            done.append(part)
            continue
        links += 1
        if links > MAX_LINKS:
            raise NotADirectoryError(20, "too many links", path)
        if target.startswith("/"):
            done = []
        todo += target.split("/")[::-1]
    return "/" + "/".join(done)
