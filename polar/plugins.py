"""Registries: a name is looked up among the entry points of a group; `module:Class` is imported as it stands."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from polar.errors import InvalidTask

HARNESSES = "polar.harness_adapters"
EVALUATORS = "polar.evaluators"
BUILDERS = "polar.builders"
RUNTIMES = "polar.runtimes"


@cache
def names(group: str) -> tuple[str, ...]:
    return tuple(sorted(e.name for e in entry_points(group=group)))


@cache
def load(group: str, name: str, what: str) -> Any:
    """The object registered as `name`, or at `module:Class`. Raises InvalidTask naming what is allowed."""
    if ":" in name:
        module, _, attr = name.partition(":")
        try:
            return getattr(importlib.import_module(module), attr)
        except (ImportError, AttributeError) as e:
            raise InvalidTask(f"{what}: can't import '{name}': {e}") from e
    for entry in entry_points(group=group):
        if entry.name == name:
            try:
                return entry.load()
            except ImportError as e:
                raise InvalidTask(f"{what}: '{name}' needs a package that is not installed: {e}") from e
    raise InvalidTask(f"{what}: unknown name '{name}'; allowed: {', '.join(names(group))}, or 'module:Class'")
