"""Patch files of the agent's: what git makes of them counts, not what they look like."""

from __future__ import annotations

import pytest
from test_patch import GIT, prepared, show

from evaluators.patch import Rejected, apply
from evaluators.patch_file import named, take
from evaluators.patch_rules import PatchRules
from evaluators.patch_space import Space

TESTS = ["tests/test_a.py", "testing/deep/test_new.py"]


def taken(box, diff: str, **rules):
    """The patch made of a patch file; making it changes nothing."""
    before = show(box)
    found = take(Space(box, ".", lambda: 60), diff.encode(), PatchRules(**rules), TESTS, lambda n, d: None)
    assert show(box) == before
    return found


def new(path: str, content: str = "h", mode: str = "100644") -> str:
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1 @@\n+{content}\n\\ No newline at end of file\n"


EDIT = "@@ -1 +1 @@\n-x\n+h\n"
QUOTED = '"a/\\164ests/test_a.py"'


@pytest.mark.parametrize(
    ("diff", "protected", "files"),
    [
        ("--- zz/tests/test_a.py\n+++ zz/tests/test_a.py\n" + EDIT, ["tests/test_a.py"], []),
        (f"diff --git {QUOTED} {QUOTED.replace('a/', 'b/')}\n--- {QUOTED}\n+++ {QUOTED.replace('a/', 'b/')}\n{EDIT}",
         ["tests/test_a.py"], []),
        ("--- /dev/null\n+++ zz/conftest.py\n@@ -0,0 +1 @@\n+h\n", ["conftest.py"], []),
        # Without a folder in the first name, git takes all names as they are.
        ("--- run.sh\n+++ run.sh\n@@ -1 +1 @@\n-#!/bin/sh\n+h\n--- tests/test_a.py\n+++ tests/test_a.py\n" + EDIT,
         ["tests/test_a.py"], ["run.sh"]),
        ("diff --git a/tests/test_a.py b/src/x.py\nsimilarity index 100%\nrename from tests/test_a.py\nrename to src/x.py\n",
         ["tests/test_a.py"], ["src/x.py"]),
        ('diff --git a/src/a.py b/conftest.py\nsimilarity index 100%\ncopy from src/a.py\ncopy to "c\\157nftest.py"\n',
         ["conftest.py"], []),
        (f"diff --git {QUOTED} {QUOTED.replace('a/', 'b/')}\nold mode 100644\nnew mode 100755\n", ["tests/test_a.py"], []),
        (new("testing", "src", "120000") + new("src/x.py"), ["testing"], ["src/x.py"]),
        (new("testing/deep"), ["testing/deep"], []),
        (new("src/setup.cfg", "[tool:pytest]") + new("src/tox.ini", "[other]"), ["src/setup.cfg"], ["src/tox.ini"]),
        (new("src/__pycache__/a.pyc") + new("src/x.py"), [], ["src/x.py"]),
        ("diff --git a/setup.cfg b/setup.cfg\ndeleted file mode 100644\n--- a/setup.cfg\n+++ /dev/null\n"
         "@@ -1,2 +0,0 @@\n-[tool:pytest]\n-addopts = -q\n" + new("setup.cfg/x"), ["setup.cfg", "setup.cfg/x"], []),
    ],
)  # fmt: skip
def test_names_are_those_that_git_reads(make, diff, protected, files):
    box = prepared(make)
    found = taken(box, diff)
    assert (sorted(found.protected), found.files) == (protected, files)
    pristine, space = show(box), Space(box, ".", lambda: 60)
    apply(space, found.data, "agent.diff")
    after = show(box)
    assert {p for p in {*pristine, *after} if pristine.get(p) != after.get(p)} == set(files)
    with pytest.raises(Rejected) as e:
        taken(prepared(make), diff if protected else new("conftest.py"), on_protected="fail")
    assert e.value.code == "patch_touches_protected"


def test_both_ends_of_a_rename_are_named(make):
    space = Space(prepared(make), ".", lambda: 60)
    rename = b'diff --git a/x "b/y\\nz"\nsimilarity index 100%\nrename from x\nrename to "y\\nz"\n'
    edit = f"--- zz/p q\t\n+++ zz/p q\t\n{EDIT}".encode()
    assert named(space, "d", edit + rename) == ["p q", "x", "y\nz"]
    assert named(space, "d", b"") == named(space, "d", b"garbage\n") == []


def test_a_dirty_base_and_a_merge(make):
    """Against the work tree as it is; what doesn't fit there is merged with what the patch was made against."""
    box = prepared(make)
    box.exec(f"seq 30 >src/a.py; {GIT} commit -qam n; {GIT} checkout -qb o; sed -i s/15/fifteen/ src/a.py; "
             f"{GIT} commit -qam o; {GIT} diff --full-index HEAD~ >/tmp/p; {GIT} checkout -q main", timeout=60)  # fmt: skip
    diff = box.exec("cat /tmp/p", timeout=60).output.decode()
    with pytest.raises(Rejected) as e:
        taken(box, diff.replace("-15", "-other"))
    assert e.value.code == "patch_does_not_apply"
    box.exec("seq 30 | sed '2i2.5' >src/a.py", timeout=60)
    notes = "--- a/notes.txt\n+++ b/notes.txt\n@@ -1 +1 @@\n-untracked\n+known\n"
    found = taken(box, diff + notes)
    apply(Space(box, ".", lambda: 60), found.data, "agent.diff")
    assert found.files == ["notes.txt", "src/a.py"]
    out = box.exec("cat src/a.py notes.txt", timeout=60).output
    assert b"2.5" in out and b"fifteen" in out and b"known" in out
    box.exec("seq 30 | sed 's/^13$/thirteen/;s/^17$/seventeen/' >src/a.py", timeout=60)
    merged = taken(box, diff)
    assert merged.files == ["src/a.py"]
    apply(Space(box, ".", lambda: 60), merged.data, "agent.diff")
    assert b"thirteen\n14\nfifteen\n16\nseventeen" in box.exec("cat src/a.py", timeout=60).output


def test_git_may_not_take_forever(make):
    space = Space(prepared(make), ".", lambda: 60)
    with pytest.raises(Rejected) as e:
        take(space, new("src/x.py").encode(), PatchRules(), [], lambda n, d: None, limit=0.001)
    assert e.value.code == "patch_does_not_apply" and "longer than" in e.value.message


@pytest.mark.parametrize(
    ("diff", "code"),
    [
        ("garbage\n", "patch_does_not_apply"),
        ("--- /dev/null\n+++ b/../evil\n@@ -0,0 +1 @@\n+x\n", "patch_leaves_repository"),
        (new(".git/hooks/x"), "patch_leaves_repository"),
        (new("big", "b" * 2000), "patch_too_large"),
    ],
)
def test_patch_files_that_are_refused(make, diff, code):
    with pytest.raises(Rejected) as e:
        taken(prepared(make), diff, limit_bytes=1000)
    assert e.value.code == code, e.value.message
