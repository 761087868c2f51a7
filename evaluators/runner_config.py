"""Files that configure test runners among other things: the part of them that no patch may change."""

from __future__ import annotations

import configparser
import json
import tomllib
from typing import Any

_SECTIONS = ("tool:pytest", "pytest", "nosetests", "unittest", "aliases", "coverage:run")
_TABLES = ("pytest", "coverage", "nose2")
_KEYS = ("scripts", "jest", "mocha", "ava", "vitest", "nyc", "c8", "tap")
NAMES = ("setup.cfg", "tox.ini", "pyproject.toml", "package.json")


def is_shared(path: str) -> bool:
    return path.rpartition("/")[2] in NAMES


def changed(path: str, before: bytes | None, after: bytes | None) -> bool:
    """Does the part about test runners differ? None is a file that isn't there."""
    return _part(path, before) != _part(path, after)


def _part(path: str, data: bytes | None) -> Any:
    """What the runners read; the bytes themselves if they can't be parsed, for the runners' parsers may be more lenient."""
    name = path.rpartition("/")[2]
    if data is None:
        return {}
    try:
        text = data.decode()
        if name == "pyproject.toml":
            tool = tomllib.loads(text).get("tool", {})
            return {k: tool[k] for k in _TABLES if k in tool}
        if name == "package.json":
            content = json.loads(text)
            return {k: content[k] for k in _KEYS if k in content}
        parser = configparser.RawConfigParser(strict=False)
        parser.read_string(text)
        return {s: dict(parser[s]) for s in _SECTIONS if parser.has_section(s)}
    except (ValueError, configparser.Error, AttributeError, TypeError, RecursionError):
        return data
