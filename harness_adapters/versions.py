"""Which version of which package each harness is: `versions.toml` as structs."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files

from msgspec import Struct

from polar.codec import convert


class Harness(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One package, from npm or from PyPI. `binary` is a native program below node_modules that needs no node."""

    version: str
    command: str
    npm: str = ""
    pypi: str = ""
    binary: str = ""


class Node(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    version: str


class Versions(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    before: str
    node: Node
    harnesses: dict[str, Harness]


@cache
def versions() -> Versions:
    text = files("harness_adapters").joinpath("versions.toml").read_text(encoding="utf-8")
    return convert(tomllib.loads(text), Versions, "versions.toml")
