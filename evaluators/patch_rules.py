"""Which of an agent's changes belong to its patch: globs over repository paths, and what no patch may touch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from evaluators.config import WHERE, check_path
from polar.errors import InvalidTask

# Never part of a patch: what tools leave behind.
LITTER = ["**/__pycache__/**", "**/*.pyc", "**/.pytest_cache/**", "**/.polar-*/**"]

# Read by interpreters, test runners and shells before, or instead of, what the judge means to run.
HOOKS = [
    "**/conftest.py", "**/sitecustomize.py", "**/usercustomize.py", "**/*.pth", "**/*.egg-link",
    "**/pytest.ini", "**/.pytest.ini", "**/pytest.toml", "**/.pytest.toml", "**/.coveragerc", "**/nose2.cfg", "**/.noserc",
    "**/pyvenv.cfg", "**/.pdbrc", "**/.pythonstartup", "**/.npmrc", "**/.mocharc*", "**/jest.config.*",
    "**/vitest.config.*", "**/.babelrc*", "**/.envrc", "**/.bashrc", "**/.profile",
]  # fmt: skip

# A folder of one of these names holds nothing but tests.
_TEST_FOLDERS = {"test", "tests", "__tests__", "spec", "specs"}

# What would stand in for the runner itself, if a file of that name lay where the tests are started.
_RUNNERS = {
    "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "py", "xdist", "execnet",
    "pytest_asyncio", "pytest_timeout", "pytest_cov", "coverage", "nose", "nose2", "hypothesis", "attr", "attrs", "mock",
    "tox",
}  # fmt: skip


class PatchRules(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`exclude`: globs left out of the patch. `protect`: globs that stay as the image has them, besides tests, hooks of
    runners and interpreters (unless `protect_hooks` is false); `on_protected`: leave such a change out, or fail the
    attempt. `keep_ignored`: also what the image's own ignore rules cover. `limit_bytes` bounds the patch. `source`: the
    changes themselves, or the sandbox path of a patch file that the agent wrote."""

    exclude: list[str] = field(default_factory=list)
    protect: list[str] = field(default_factory=list)
    protect_hooks: bool = True
    on_protected: Literal["restore", "fail"] = "restore"
    keep_ignored: bool = False
    limit_bytes: Annotated[int, Meta(ge=1)] = 10 * 1024 * 1024
    source: str = "changes"

    def check(self, where: str) -> None:
        for name in ("exclude", "protect"):
            for n, glob in enumerate(getattr(self, name)):
                if not glob or glob.startswith("/") or ".." in glob.split("/"):
                    raise InvalidTask(f"{WHERE}.{where}.{name}[{n}]: '{glob}' is no glob relative to the repository")
        if self.source != "changes":
            check_path(self.source, f"{where}.source")


def matcher(globs: list[str]) -> re.Pattern[str] | None:
    """`*` and `?` stay within a folder, `**` crosses; a glob that names a folder covers what is in it."""
    return re.compile("|".join(f"(?:{_regex(g)})" for g in globs), re.DOTALL) if globs else None


@cache
def _regex(glob: str) -> str:
    glob, out, i = glob.strip("/"), "", 0
    while i < len(glob):
        if glob.startswith("**/", i):
            out, i = out + "(?:.*/)?", i + 3
        elif glob.startswith("**", i):
            out, i = out + ".*", i + 2
        else:
            out, i = out + {"*": "[^/]*", "?": "[^/]"}.get(glob[i], re.escape(glob[i])), i + 1
    return out + "(?:/.*)?\\Z"


class Protection:
    """Decides about single paths, all relative to the repository."""

    def __init__(self, rules: PatchRules, tests: list[str]):
        self._exclude = matcher([*LITTER, *rules.exclude])
        self._protect = matcher([*rules.protect, *(HOOKS if rules.protect_hooks else []), *test_places(tests)])
        self._shadows = rules.protect_hooks
        # As a file or a link, each would keep the judge from putting its tests there, or lead them elsewhere.
        self._parents = {folder for test in tests for folder in parents(test)}

    def excluded(self, path: str) -> bool:
        return self._exclude is not None and self._exclude.match(path) is not None

    def protected(self, path: str, known: Callable[[str], bool]) -> bool:
        """`known`: does the pristine repository have this file or folder?"""
        if path in self._parents or (self._protect is not None and self._protect.match(path)):
            return True
        return self._shadows and (module := shadowing(path)) is not None and not known(module)


def test_places(tests: list[str]) -> list[str]:
    """Globs for test files, and for all of a folder that by its name holds tests only."""
    out = []
    for test in tests:
        parts = test.split("/")
        deep = next((n for n, part in enumerate(parts[:-1]) if part.lower() in _TEST_FOLDERS), None)
        out.append(_literal("/".join(parts if deep is None else parts[: deep + 1])))
    return sorted(set(out))


def parents(path: str) -> list[str]:
    """The folders above a path."""
    return [path[:n] for n, c in enumerate(path) if c == "/"]


def _literal(path: str) -> str:
    return path.replace("*", "?")


def shadowing(path: str, *, runners_only: bool = False) -> str | None:
    """The top-level module that `path` is or belongs to (also in folders that are often on the import path), if it has
    the name of a test runner's module or, unless `runners_only`, of one of Python's own."""
    parts = path.split("/")
    at = 1 if len(parts) > 1 and parts[0] in ("src", "lib", *_TEST_FOLDERS) else 0
    name, _, ending = parts[at].partition(".")
    module = at == len(parts) - 1
    if name not in _RUNNERS and (runners_only or name not in sys.stdlib_module_names):
        return None
    if module and not (ending in ("py", "pyc") or ending.endswith("so")):
        return None
    return None if ending and not module else "/".join(parts[: at + 1])
