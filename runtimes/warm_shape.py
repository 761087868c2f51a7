"""Which specs a warm sandbox may serve, when two of them are the same, and how many of each are worth keeping. Pure but for
looking at the folders that are to be mounted."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
from msgspec import structs

from polar.sandbox import ProxyEndpoint
from polar.task import RuntimeSpec

# What is not part of a sandbox as it is created: the steps come later, and every back-end keeps its own.
_APART = ("backend", "prepare", "evaluation_prepare")
# Below so many requests in the time that is looked back on, a shape is one of a kind and nothing is made for it.
AGAIN = 2
_AT_FDCWD, _BIRTH = -100, 0x800  # of statx(2)


class Wish(NamedTuple):
    """A sandbox that nobody's task is in yet. Wishes with the same `key` get equal ones."""

    key: str
    spec: RuntimeSpec
    proxy: ProxyEndpoint | None


def wish(spec: RuntimeSpec, proxy: ProxyEndpoint | None) -> Wish | None:
    """None where only a sandbox of the task's own will do: its environment would be in it (and may hold a secret), an idle
    one would hold devices, the image may be another each time, or it is kept prepared for these steps."""
    if spec.env or spec.gpus or spec.options.get("pull") == "always" or spec.options.get("cache_prepare"):
        return None
    try:
        # A path is not enough: a folder that was replaced stays mounted where it was mounted before. Nor is its number, which
        # the next one may get.
        places = [(s.st_dev, s.st_ino, _born(v.source, s)) for v in spec.volumes for s in [os.stat(v.source)]]
    except OSError:
        return None
    bare = structs.replace(spec, prepare=[], evaluation_prepare=None)
    shown = {k: v for k, v in msgspec.to_builtins(bare).items() if k not in _APART}
    text = json.dumps([shown, places, msgspec.to_builtins(proxy)], sort_keys=True)
    return Wish(hashlib.sha256(text.encode()).hexdigest()[:32], bare, proxy)


def _born(path: str, info: os.stat_result) -> int:
    """When a file was made, in nanoseconds; where that isn't known, when it was last changed. Raises OSError."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)
    found = ctypes.create_string_buffer(256)
    if call is None or call(_AT_FDCWD, os.fsencode(path), 0, _BIRTH, found):
        return info.st_ctime_ns
    (mask,), (seconds, rest) = struct.unpack_from("I", found), struct.unpack_from("qI", found, 80)
    return seconds * 10**9 + rest if mask & _BIRTH else info.st_ctime_ns


def shares(asked: Mapping[str, int], size: int) -> dict[str, int]:
    """How many sandboxes of each key to keep, `size` in all, by how often each was asked for (highest averages). Never more
    of one than it was asked for."""
    kept = {key: 0 for key, n in asked.items() if n >= AGAIN}
    for _ in range(size):
        open_ = [key for key, n in kept.items() if n < asked[key]]
        if not open_:
            break
        kept[max(open_, key=lambda key: asked[key] / (kept[key] + 1))] += 1
    return {key: n for key, n in kept.items() if n}
