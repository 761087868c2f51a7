"""Small repositories with real bugs: what the agent gets, the fix, half of it, a fix that breaks something, and the tests."""

from __future__ import annotations

import difflib
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polar.task import Exec, Prepare, UploadFile
from runtimes import bwrap

IMAGE = "polar-sandbox:repos"
REPO = "/repo"
Files = dict[str, str]


@dataclass
class Repo:
    name: str
    files: Files
    gold: Files
    half: Files
    breaking: Files
    tests: Files  # as the judge has them
    fail_to_pass: list[str]
    pass_to_pass: list[str]
    command: str  # {python} stands for the interpreter
    report: dict[str, Any] = field(default_factory=lambda: {"kind": "pytest"})
    test_files: list[str] = field(default_factory=list)

    def prepare(self) -> list[Prepare]:
        git = "git -c user.name=t -c user.email=t@t -c init.defaultBranch=main"
        commit = f"cd {REPO} && {git} init -q . && {git} add -A && {git} commit -qm base"
        files = [UploadFile(target=f"{REPO}/{p}", content=c) for p, c in self.files.items()]
        return [*files, Exec(command=commit)]

    def test_patch(self) -> str:
        return diff(self.files, self.tests)

    def config(self, python: str, **changes: Any) -> dict[str, Any]:
        return {
            "repo": REPO, "instance_id": self.name, "test_command": self.command.replace("{python}", python),
            "fail_to_pass": self.fail_to_pass, "pass_to_pass": self.pass_to_pass, "test_patch": self.test_patch(),
            "report": self.report, "test_files": self.test_files, "timeout_seconds": 60,
        } | changes  # fmt: skip


def writes(files: Files) -> str:
    """A shell command by which an agent writes `files`."""
    lines = [f"cd {REPO}"]
    for path, content in files.items():
        folder = path.rpartition("/")[0] or "."
        lines.append(f"mkdir -p {shlex.quote(folder)} && printf %s {shlex.quote(content)} >{shlex.quote(path)}")
    return " && ".join(lines)


def diff(old: Files, new: Files) -> str:
    """As git writes it, for text files that end with a newline."""
    out = []
    for path, content in new.items():
        before = old.get(path)
        if before == content:
            continue
        out.append(f"diff --git a/{path} b/{path}\n" + ("" if before is not None else "new file mode 100644\n"))
        out += difflib.unified_diff(
            (before or "").splitlines(True),
            content.splitlines(True),
            f"a/{path}" if before is not None else "/dev/null",
            f"b/{path}",
        )
    return "".join(out)


def image() -> str:
    """The base image with pytest, Node and a C compiler, as far as this host has them."""
    if subprocess.run(["docker", "image", "inspect", IMAGE], capture_output=True).returncode == 0:
        return IMAGE
    root = Path(__file__).parents[2]
    extra = [p for p in ("nodejs", "gcc", "libc6-dev", "make") if _installed(p)]
    base = ["bash", "ca-certificates", "coreutils", "dash", "findutils", "git", "grep", "python3", "sed", "tar"]
    subprocess.run(
        [sys.executable, root / "compose/base_image.py", "--tag", f"{IMAGE}-base", *base, *extra], check=True
    )
    import _pytest
    import iniconfig
    import packaging
    import pluggy
    import pygments
    import pytest

    with tempfile.TemporaryDirectory() as temp:
        site = Path(temp) / "site"
        site.mkdir()
        for module in (_pytest, pytest, pluggy, iniconfig, packaging, pygments):
            source = Path(str(module.__file__)).parent
            subprocess.run(["cp", "-r", source, site], check=True)
        shutil.copy(Path(str(pytest.__file__)).parents[1] / "py.py", site)
        (Path(temp) / "Dockerfile").write_text(f"FROM {IMAGE}-base\nCOPY site /usr/lib/python3/dist-packages\n")
        subprocess.run(["docker", "build", "-q", "-t", IMAGE, temp], check=True, stdout=subprocess.DEVNULL)
    return IMAGE


def _installed(package: str) -> bool:
    done = subprocess.run(["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True)
    return done.stdout == "installed"


_WORDS = '''\
"""Words to slugs and titles."""


def slug(text):
    return "-".join(text.lower().split(" "))


def initials(text):
    return "".join(w[0] for w in text.split(" "))


def count(text):
    return len(text.split())
'''
_WORDS_HALF = _WORDS.replace('.lower().split(" ")', ".lower().split()")
_WORDS_GOLD = _WORDS_HALF.replace('for w in text.split(" ")', "for w in text.split()")
_TEST = """\
from words import count, slug


def test_slug():
    assert slug("Hello World") == "hello-world"


def test_count():
    assert count(" a  b ") == 2
"""
PYTHON = Repo(
    name="words",
    files={"src/words.py": _WORDS, "tests/test_words.py": _TEST, "README.md": "Words.\n"},
    gold={"src/words.py": _WORDS_GOLD},
    half={"src/words.py": _WORDS_HALF},
    breaking={"src/words.py": _WORDS_GOLD.replace("len(text.split())", 'len(text.split(" "))')},
    tests={
        "tests/test_words.py": _TEST.replace("count, slug", "count, initials, slug")
        + '\n\ndef test_slug_spaces():\n    assert slug(" Hello   World ") == "hello-world"\n'
        + '\n\ndef test_initials_spaces():\n    assert initials("Hello  World") == "HW"\n'
    },
    fail_to_pass=["tests/test_words.py::test_slug_spaces", "tests/test_words.py::test_initials_spaces"],
    pass_to_pass=["tests/test_words.py::test_slug", "tests/test_words.py::test_count"],
    command="PYTHONPATH=src {python} -m pytest -rA -q tests",
)

_LRU = """\
class Cache {
  constructor(size) { this.size = size; this.map = new Map(); }
  get(key) {
    return this.map.get(key);
  }
  set(key, value) {
    this.map.set(key, value);
    if (this.map.size > this.size) this.map.delete(this.map.keys().next().value);
  }
  has(key) { return this.map.has(key); }
}
module.exports = { Cache };
"""
_LRU_HALF = _LRU.replace(
    "    return this.map.get(key);\n",
    "    if (!this.map.has(key)) return undefined;\n    const value = this.map.get(key);\n"
    "    this.map.delete(key);\n    this.map.set(key, value);\n    return value;\n",
)
_LRU_GOLD = _LRU_HALF.replace("  set(key, value) {\n", "  set(key, value) {\n    this.map.delete(key);\n")
_LRU_TEST = """\
const test = require('node:test');
const assert = require('node:assert');
const { Cache } = require('../lru.js');

test('evicts the oldest', () => {
  const c = new Cache(2);
  c.set('a', 1); c.set('b', 2); c.set('c', 3);
  assert.equal(c.has('a'), false);
  assert.equal(c.get('c'), 3);
});
"""
NODE = Repo(
    name="lru",
    files={"lru.js": _LRU, "test/lru.test.js": _LRU_TEST},
    gold={"lru.js": _LRU_GOLD},
    half={"lru.js": _LRU_HALF},
    breaking={"lru.js": _LRU_GOLD.replace("if (this.map.size > this.size)", "if (false)")},
    tests={
        "test/lru.test.js": _LRU_TEST
        + "\ntest('reading renews', () => {\n  const c = new Cache(2);\n  c.set('a', 1); c.set('b', 2); c.get('a'); c.set('c', 3);\n"
        "  assert.equal(c.has('a'), true);\n});\n"
        "\ntest('writing renews', () => {\n  const c = new Cache(2);\n  c.set('a', 1); c.set('b', 2); c.set('a', 4); c.set('c', 3);\n"
        "  assert.equal(c.has('a'), true);\n});\n"
    },
    fail_to_pass=["reading renews", "writing renews"],
    pass_to_pass=["evicts the oldest"],
    command="node --test --test-reporter=tap test/",
    report={"kind": "tap"},
    test_files=["test/lru.test.js"],
)

_RING = """\
#include "ring.h"

void ring_init(struct ring *r) { r->head = r->count = 0; }

int ring_push(struct ring *r, int value) {
    if (r->count > RING_SIZE) return -1;
    r->data[(r->head + r->count) % RING_SIZE] = value;
    r->count++;
    return 0;
}

int ring_pop(struct ring *r, int *value) {
    *value = r->data[r->head];
    r->head = (r->head + 1) % RING_SIZE;
    r->count--;
    return 0;
}
"""
_RING_HALF = _RING.replace("count > RING_SIZE", "count >= RING_SIZE")
_RING_GOLD = _RING_HALF.replace("    *value = r", "    if (r->count == 0) return -1;\n    *value = r")
_RING_TEST = """\
#include <stdio.h>
#include "../ring.h"
static int n;
static void ok(int good, const char *what) { printf("%sok %d - %s\\n", good ? "" : "not ", ++n, what); }
int main(void) {
    struct ring r;
    int v = 0;
    ring_init(&r);
    ring_push(&r, 1); ring_push(&r, 2); ring_pop(&r, &v);
    ok(v == 1, "first in first out");
/*MORE*/
    printf("1..%d\\n", n);
    return 0;
}
"""
C = Repo(
    name="ring",
    files={
        "ring.c": _RING,
        "ring.h": "#define RING_SIZE 4\nstruct ring { int data[RING_SIZE]; int head, count; };\n"
        "void ring_init(struct ring *);\nint ring_push(struct ring *, int);\nint ring_pop(struct ring *, int *);\n",
        "Makefile": "check:\n\t$(CC) -o /tmp/check tests/check.c ring.c && /tmp/check\n",
        "tests/check.c": _RING_TEST.replace("/*MORE*/\n", ""),
    },
    gold={"ring.c": _RING_GOLD},
    half={"ring.c": _RING_HALF},
    breaking={"ring.c": _RING_GOLD.replace("*value = r->data[r->head]", "*value = r->data[r->head + 1]")},
    tests={
        "tests/check.c": _RING_TEST.replace(
            "/*MORE*/",
            "    ring_init(&r);\n    for (int i = 0; i < RING_SIZE; i++) ring_push(&r, i);\n"
            '    ok(ring_push(&r, 9) == -1, "full refuses");\n    ring_init(&r);\n    ok(ring_pop(&r, &v) == -1, "empty refuses");',
        )
    },
    fail_to_pass=["full refuses", "empty refuses"],
    pass_to_pass=["first in first out"],
    command="make -s check",
    report={"kind": "tap"},
    test_files=["tests/check.c"],
)
REPOS = {r.name: r for r in (PYTHON, NODE, C)}


def no_local_python() -> str:
    """Why this interpreter, which has pytest, can't run in a local sandbox; empty if it can."""
    if isinstance(found := bwrap.find(), str):
        return f"no working bubblewrap: {found}"
    if not bwrap.environment(["/tmp", bwrap.HOME]) and not bwrap.under(sys.prefix, bwrap.SYSTEM):
        return f"a sandbox can't see this environment: {sys.prefix} lies where it has a folder of its own"
    return ""
