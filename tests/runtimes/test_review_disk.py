"""Ways round a watched `disk_mb` that were once possible."""

from __future__ import annotations

import os

from runtimes.disk import usage


def test_what_lies_below_the_longest_path_is_not_overlooked(tmp_path):
    top = os.open(tmp_path, os.O_RDONLY)
    at = os.dup(top)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=at)
        at, old = os.open("d" * 250, os.O_RDONLY, dir_fd=at), at
        os.close(old)
    with open(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=at), "wb") as f:
        f.write(b"x" * (2 << 20))
    os.close(at)
    os.close(top)
    assert usage(tmp_path, 1 << 20) > 1 << 20
