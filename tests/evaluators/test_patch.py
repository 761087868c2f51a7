"""Patch extraction: whatever kind of change, however the agent hid it, without trusting anything of the agent's."""

from __future__ import annotations

import pytest

from evaluators.patch import Patch, Rejected, apply, extract
from evaluators.patch_rules import PatchRules, matcher, shadowing
from evaluators.patch_space import Space
from polar.judge import Changes

GIT = "git -c user.name=t -c user.email=t@t -c init.defaultBranch=main -c protocol.file.allow=always"
PREPARE = f"""
set -e
mkdir -p src tests data && printf 'a\\n' >src/a.py && printf 'b\\n' >src/b.py && printf 'x\\n' >tests/test_a.py
printf 'one\\ntwo\\nthree\\nfour\\nfive\\nsix\\n' >src/moved.py && head -c 3000 /dev/zero >data/bin && echo i >src/gone.py
printf 'win\\r\\n' >data/crlf.txt && printf '*.log\\nbuild/\\n' >.gitignore && ln -s a.py src/link && echo c >tests/conftest.py
printf '#!/bin/sh\\n' >run.sh && mkdir sub && (cd sub && {GIT} init -q . && echo s >s.txt && {GIT} add . && {GIT} commit -qm s)
printf '[tool:pytest]\\naddopts = -q\\n' >setup.cfg
{GIT} init -q . && {GIT} add . 2>/dev/null && {GIT} commit -qm base && echo dirty >>src/b.py && echo untracked >notes.txt
mkdir build && echo o >build/o.so && echo log >x.log
"""
SHOW = """
find . -name .git -prune -o ! -type d -exec sh -c 'for p; do if [ -L "$p" ]; then echo "$p -> $(readlink "$p")"; else
echo "$p $([ -x "$p" ] && echo x) $(md5sum <"$p")"; fi; done' sh {} + | sort
"""


def prepared(make):
    box = make()
    r = box.exec(PREPARE, timeout=60)
    assert r.exit_code == 0, r.output
    return box


def show(box) -> dict[str, str]:
    r = box.exec(SHOW, timeout=60, output_limit=1 << 20)
    assert r.exit_code == 0, r.output
    return dict(line[2:].partition(" ")[::2] for line in r.output.decode().splitlines())


def attempt(make, tmp_path, work: str, limit: int = 1 << 24, look: bool = True):
    """What the agent's commands make of a prepared sandbox."""
    box = prepared(make)
    baseline = box.baseline(".")
    r = box.exec(work, timeout=60)
    assert r.exit_code == 0, r.output
    final = show(box) if look else {}
    box.stop()
    cut = box.changes(tmp_path / "c.tar", under=".", baseline=baseline, limit=limit)
    return Changes(under=".", archive=tmp_path / "c.tar", truncated=cut), final


def patch_of(make, tmp_path, work: str, tests=("tests/test_a.py",), **rules) -> tuple[Patch, dict, dict, dict]:
    """The patch, and files: of the agent, pristine, and of a fresh sandbox with the patch."""
    changes, final = attempt(make, tmp_path, work)
    fresh = prepared(make)
    pristine = show(fresh)
    space = Space(fresh, ".", lambda: 60)
    patch = extract(
        space, changes, PatchRules(**rules), list(tests), lambda n, d: (tmp_path / n).write_bytes(d) and None
    )
    assert show(fresh) == pristine  # making it changes nothing
    apply(space, patch.data, "agent.diff")
    assert (tmp_path / "patch.diff").read_bytes() == patch.data
    return patch, final, pristine, show(fresh)


WORK = f"""
set -e
echo more >>src/a.py; echo again >>src/b.py; rm src/gone.py; {GIT} mv src/moved.py src/renamed.py
echo new >src/new.py; {GIT} add src/new.py; {GIT} commit -qam 'a commit'; echo after >>src/new.py
head -c 2000 /dev/urandom >data/bin; head -c 100 /dev/urandom >data/bin2; chmod +x run.sh; printf 'win\\r\\nmore\\r\\n' >data/crlf.txt
rm src/link; ln -s /etc/hostname src/link; ln -s b.py src/link2; echo in >>sub/s.txt; echo fresh >sub/new.txt
rm notes.txt; mkdir -p 'odd dir'; echo o >"$(printf 'odd dir/n\\tü \\nx')"; ln src/a.py src/hard.py
"""


def test_every_kind_of_change_is_in_the_patch(make, tmp_path):
    patch, final, pristine, patched = patch_of(make, tmp_path, WORK)
    assert patched == final != pristine
    assert b"rename from src/moved.py" in patch.data and b"GIT binary patch" in patch.data
    assert {"src/gone.py", "notes.txt", "sub/s.txt", "sub/new.txt", "src/b.py"} <= set(patch.files)
    assert patch.protected == []


def test_nothing_changed_is_an_empty_patch(make, tmp_path):
    patch, *_ = patch_of(make, tmp_path, f"{GIT} commit -q --allow-empty -m x; touch src/a.py")
    assert (patch.data, patch.files, patch.protected) == (b"", [], [])


def test_a_file_and_a_folder_change_places(make, tmp_path):
    _, final, _, patched = patch_of(
        make, tmp_path, "rm -r data && echo f >data && rm run.sh && mkdir run.sh && echo g >run.sh/g"
    )
    assert patched == final


def test_the_agents_git_is_not_used(make, tmp_path):
    """Hooks, filters, attributes, excludes, index flags and a removed .git change nothing."""
    work = """
    git config core.hooksPath hooks; mkdir hooks; printf '#!/bin/sh\\ntouch /tmp/hooked\\n' >hooks/pre-commit; chmod +x hooks/*
    git config filter.evil.clean 'sed s/bad/good/'; echo '* filter=evil eol=crlf -diff' >.gitattributes
    echo 'src/' >.git/info/exclude; echo '*.py' >>.gitignore; echo bad >>src/a.py; git update-index --assume-unchanged src/b.py
    echo hidden >>src/b.py; echo new >src/new.py; rm -rf .git/refs
    """
    patch, final, _, patched = patch_of(make, tmp_path, work)
    assert patched == final and b"+bad\n" in patch.data
    assert {"src/new.py", "src/b.py", ".gitattributes", ".gitignore", "hooks/pre-commit"} == set(patch.files) - {
        "src/a.py"
    }
    patch, final, _, patched = patch_of(make, tmp_path, "rm -rf .git; echo bad >>src/a.py")
    assert patched == final and patch.files == ["src/a.py"]


def test_ignored_excluded_and_protected_paths_stay(make, tmp_path):
    work = """
    echo p >build/p.so; echo q >>build/o.so; echo more >>x.log; mkdir -p __pycache__; echo c >__pycache__/a.pyc; echo n >>notes.txt
    echo h >conftest.py; rm tests/conftest.py; echo h >tests/test_a.py; echo h >tests/new.py; echo h >sitecustomize.py
    echo h >src/x.pth; mkdir pytest; echo h >pytest/__init__.py; echo ok >src/new.py; echo h >random.py; echo h >src/json.py
    """
    patch, _, pristine, patched = patch_of(make, tmp_path, work, exclude=["notes.*"])
    assert patch.files == ["src/new.py"]
    assert set(patched) - set(pristine) == {"src/new.py"} and all(patched[p] == v for p, v in pristine.items())
    assert set(patch.protected) == {
        "conftest.py", "tests/conftest.py", "tests/test_a.py", "tests/new.py", "sitecustomize.py", "src/x.pth",
        "pytest/__init__.py", "random.py", "src/json.py",
    }  # fmt: skip
    with pytest.raises(Rejected) as e:
        patch_of(make, tmp_path, "echo h >conftest.py", on_protected="fail")
    assert e.value.code == "patch_touches_protected" and "conftest.py" in e.value.message


def test_nothing_takes_the_place_of_what_is_protected(make, tmp_path):
    """Neither a file that of a folder, nor a folder that of a file, nor anything that of a folder that tests go to."""
    work = """
    rm -r tests && echo h >tests; rm setup.cfg && mkdir setup.cfg && echo h >setup.cfg/x; ln -s src testing; rm -r data
    mkdir data && echo h >data/deep; echo ok >src/new.py; (yes '#' | head -c 5000000; echo '[pytest]') >src/tox.ini
    """
    later = ("testing/test_b.py", "data/deep/test_c.py")
    patch, _, pristine, patched = patch_of(make, tmp_path, work, tests=later)
    assert set(patch.protected) == {"tests", "tests/conftest.py", "setup.cfg", "setup.cfg/x", "testing", "data/deep",
                                    "src/tox.ini"}  # fmt: skip
    assert set(patched) - set(pristine) == {"src/new.py"}
    assert set(pristine) - set(patched) == {"tests/test_a.py", "data/bin", "data/crlf.txt"}
    assert all(patched[p] == pristine[p] for p in ("tests/conftest.py", "setup.cfg"))


def test_kept_ignored_files(make, tmp_path):
    patch, final, _, patched = patch_of(make, tmp_path, "echo p >build/p.so; echo q >>build/o.so", keep_ignored=True)
    assert patched == final and set(patch.files) == {"build/p.so", "build/o.so"}


def test_a_large_patch_is_refused(make, tmp_path):
    with pytest.raises(Rejected) as e:
        patch_of(make, tmp_path, "head -c 30000 /dev/urandom >big", limit_bytes=10_000)
    assert e.value.code == "patch_too_large" and "10000" in e.value.message
    changes, _ = attempt(make, tmp_path, "truncate -s 10G huge; echo x >>src/a.py", limit=1 << 16, look=False)
    assert changes.truncated
    with pytest.raises(Rejected) as e:
        extract(Space(prepared(make), ".", lambda: 60), changes, PatchRules(), [], lambda n, d: None)
    assert e.value.code == "patch_too_large"


def test_a_folder_without_git(make, tmp_path):
    no_git = "rm -rf .git sub/.git"
    box = prepared(make)
    assert box.exec(no_git, timeout=60).exit_code == 0
    baseline = box.baseline(".")
    assert box.exec("echo n >>notes.txt; rm src/a.py; echo l >y.log", timeout=60).exit_code == 0
    final = show(box)
    box.changes(tmp_path / "c.tar", under=".", baseline=baseline, limit=1 << 24)
    fresh = prepared(make)
    assert fresh.exec(no_git, timeout=60).exit_code == 0
    space = Space(fresh, ".", lambda: 60)
    patch = extract(space, Changes(under=".", archive=tmp_path / "c.tar"), PatchRules(), [], lambda n, d: None)
    apply(space, patch.data, "agent.diff")
    assert show(fresh) == final and set(patch.files) == {"notes.txt", "src/a.py", "y.log"}


@pytest.mark.parametrize(
    ("diff", "code"),
    [
        ("--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-nothing like it\n+x\n", "patch_does_not_apply"),
        ("--- /dev/null\n+++ b/../evil\n@@ -0,0 +1 @@\n+x\n", "patch_leaves_repository"),
        ("diff --git a/.git/hooks/x b/.git/hooks/x\nnew file mode 100755\n--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+x\n",
         "patch_leaves_repository"),
        ("diff --git a/o b/o\nnew file mode 120000\n--- /dev/null\n+++ b/o\n@@ -0,0 +1 @@\n+/tmp\n\\ No newline at end of file\n"
         "diff --git a/o/evil b/o/evil\nnew file mode 100644\n--- /dev/null\n+++ b/o/evil\n@@ -0,0 +1 @@\n+x\n",
         "patch_leaves_repository"),
        ("garbage\n", "patch_does_not_apply"),
    ],
)  # fmt: skip
def test_patches_that_do_not_apply(make, diff, code):
    box = prepared(make)
    before = show(box)
    with pytest.raises(Rejected) as e:
        apply(Space(box, ".", lambda: 60), diff.encode(), "agent.diff", three_way=True)
    assert e.value.code == code, e.value.message
    assert show(box) == before and box.exec("ls ../evil /tmp/evil .git/hooks/x", timeout=60).exit_code != 0


def test_three_way(make):
    """A patch made against what was committed applies to a file that was edited elsewhere since."""
    box = prepared(make)
    box.exec(f"seq 30 >src/a.py; {GIT} commit -qam n; {GIT} checkout -qb o; sed -i s/15/fifteen/ src/a.py; "
             f"{GIT} commit -qam o; {GIT} diff --full-index HEAD~ >/tmp/p; {GIT} checkout -q main; "
             "sed -i 's/^14$/fourteen/; s/^18$/x/' src/a.py; sed -i s/x/18/ src/a.py; sed -i 2i2.5 src/a.py", timeout=60)  # fmt: skip
    diff = box.exec("cat /tmp/p", timeout=60).output
    with pytest.raises(Rejected):
        apply(Space(box, ".", lambda: 60), diff, "x.diff", three_way=True)  # the same hunk: a conflict
    box.exec("seq 30 | sed '2i2.5' >src/a.py", timeout=60)
    apply(Space(box, ".", lambda: 60), diff, "x.diff", three_way=True)
    assert b"fifteen" in box.exec("cat src/a.py", timeout=60).output


def test_globs():
    def hit(glob: str, path: str) -> bool:
        return matcher([glob]).match(path) is not None

    assert hit("**/conftest.py", "conftest.py") and hit("**/conftest.py", "a/b/conftest.py")
    assert hit("docs", "docs/a/b") and not hit("docs", "docs2") and not hit("*.md", "a/b.md") and hit("a/**/z", "a/z")


@pytest.mark.parametrize(
    ("path", "module"),
    [
        ("pytest.py", "pytest.py"), ("src/json/x.py", "src/json"), ("tests/_pytest/y.py", "tests/_pytest"),
        ("json.md", None), ("pkg/json.py", None), ("json.cpython-311-x86_64-linux-gnu.so", "json.cpython-311-x86_64-linux-gnu.so"),
        ("pluggy/a/b.txt", "pluggy"), ("app.py", None), ("test.d/x.py", None),
    ],
)  # fmt: skip
def test_shadowing(path, module):
    assert shadowing(path) == module
