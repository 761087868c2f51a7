"""The part of shared configuration files that decides how tests run."""

from __future__ import annotations

import pytest

from evaluators.runner_config import changed, is_shared

CFG = b"[metadata]\nname = x\n[tool:pytest]\naddopts = -q\n"
TOML = b'[project]\nname = "x"\n[tool.pytest.ini_options]\naddopts = "-q"\n'
NODE = b'{"name": "x", "scripts": {"test": "node --test"}, "dependencies": {}}'


@pytest.mark.parametrize(
    ("path", "before", "after", "differs"),
    [
        ("setup.cfg", CFG, CFG.replace(b"name = x", b"name = y"), False),
        ("setup.cfg", CFG, CFG.replace(b"-q", b"-p evil"), True),
        ("a/setup.cfg", None, b"[metadata]\nname = x\n", False),
        ("a/setup.cfg", None, CFG, True),
        ("setup.cfg", CFG, None, True),
        ("tox.ini", b"[tox]\n", b"[tox]\n[pytest]\naddopts = -p evil\n", True),
        ("pyproject.toml", TOML, TOML.replace(b'"x"', b'"y"'), False),
        ("pyproject.toml", TOML, TOML.replace(b"-q", b"-p evil"), True),
        ("pyproject.toml", TOML, b"[tool.pytest", True),  # a runner's parser may make something of it
        ("pyproject.toml", None, b"tool = 1\n", True),
        ("package.json", NODE, NODE.replace(b'"dependencies": {}', b'"dependencies": {"a": "1"}'), False),
        ("package.json", NODE, NODE.replace(b"node --test", b"true"), True),
        ("package.json", NODE, b"[]", True),
    ],
)
def test_changed(path, before, after, differs):
    assert is_shared(path) and changed(path, before, after) is differs


def test_other_files_are_not_shared():
    assert not is_shared("src/setup.py") and not is_shared("my-package.json")
