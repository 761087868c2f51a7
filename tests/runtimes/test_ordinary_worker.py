"""A worker that isn't root, and what an agent closes to it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.runtimes.ordinary import USER, ordinary_python

_USAGE = """
import os, sys
from pathlib import Path
from runtimes.disk import usage
top = Path(sys.argv[1])
deep = top / "a" / "b" / "c"
deep.mkdir(parents=True)
(deep / "f").write_bytes(b"x" * (8 << 20))
os.symlink("/tmp", deep / "link")
open_before = len(os.listdir("/proc/self/fd"))
for mode in (0, 0o100, 0o300, 0o400, 0o1200):
    folders = (deep, deep.parent, top / "a")
    for folder in folders:
        folder.chmod(mode)
    assert 8 << 20 <= usage(top) < 9 << 20, oct(mode)
    for folder in reversed(folders):
        assert folder.stat().st_mode & 0o7777 == mode, (folder, oct(mode))
        folder.chmod(0o700)
assert len(os.listdir("/proc/self/fd")) == open_before
"""

_LINK = """
import os, sys
from pathlib import Path
from runtimes import closed
top, outside = Path(sys.argv[1]), Path(sys.argv[2])
for inner in ("door", "door/in", "a/door"):
    try:
        with closed.opened(top, inner):
            raise AssertionError(inner)
    except OSError:
        pass
assert outside.stat().st_mode & 0o777 == 0
"""

# Root kind, then what is left of a hidden write, and what becomes of each trick at a path of the outcome.
_AGENT = """
import os, sys
from pathlib import Path
from polar.config import Settings
from polar.errors import NotFound
from polar.objects import open_objects
from polar.session import Session
from polar.task import RuntimeSpec
from runtimes.local import LocalRuntime
from tests.runtimes.test_conformance.test_tricks import ALL
from workers.collect import collect
data, root = Path(sys.argv[1]), sys.argv[2]
options = {"isolation": "none"} if root == "none" else {"isolation": "bwrap", "root": root}
runtime = LocalRuntime(Settings(data_dir=str(data / "d")))
objects = open_objects(f"file://{data}/o")
s = Session(session_id="s1", task_id="t1", index=0, state="RUNNING", attempt=1)
for name, script in ALL.items():
    box = runtime.create(RuntimeSpec(options=options), labels={}, proxy=None, timeout=60)
    assert box.exec(f"mkdir p; cd p; {script}", timeout=60).exit_code == 0, name
    box.stop()
    (data / name).mkdir()
    kept = collect(objects, box, s, ["p/trick"], data / name, 1000)[0]
    assert [k.truncated for k in kept] in ([], [True]), name
    try:
        box.changes(data / "c.tar", under="p/trick", baseline=b"", limit=1 << 20)
        assert "folder" in name, name
    except NotFound:
        pass
    box.changes(data / "c.tar", under=".", baseline=b"", limit=1 << 20)
    box.destroy()
box = runtime.create(RuntimeSpec(options=options, disk_mb=8), labels={}, proxy=None, timeout=60)
hidden = "mkdir d; i=0; while [ $i -lt 12 ]; do head -c 1000000 /dev/zero >d/f$i; i=$((i+1)); done; chmod 0 d"
done = box.exec(hidden, timeout=60)
assert done.exit_code == 137 and b"more than 8 MB" in done.output, done
assert box.exec("stat -c %a d", timeout=60).output.startswith(b"0\\n")
box.exec("chmod 0 /", timeout=60) if root == "overlay" else None
try:
    box.changes(data / "c.tar", under="/", baseline=b"", limit=1 << 20) if root == "overlay" else None
except NotFound:
    pass
box.destroy()
assert runtime.list({}) == [] and list(runtime.root.iterdir()) == []
print("done")
"""


def as_user(folder: Path, script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [*ordinary_python(folder), script, *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd="/", timeout=300)


def owned(path: Path) -> Path:
    path.mkdir()
    os.chown(path, USER, USER)
    return path


def test_closed_folders_are_measured_and_closed_again(public):
    done = as_user(public, _USAGE, owned(public / "top"))
    assert done.returncode == 0, done.stderr


def test_no_mode_is_changed_through_a_link(public):
    top, outside = owned(public / "top"), owned(public / "outside")
    owned(outside / "in")
    owned(top / "a")
    (top / "door").symlink_to(outside)
    (top / "a" / "door").symlink_to(outside)
    outside.chmod(0)
    done = as_user(public, _LINK, top, outside)
    assert done.returncode == 0, done.stderr


def test_tricks_on_plain_processes(public):
    done = as_user(public, _AGENT, owned(public / "data"), "none")
    assert done.stdout == "done\n", done.stderr


def test_tricks_in_a_box(public):
    for root in ("read-only", "overlay"):
        done = as_user(public, _AGENT, owned(public / root), root)
        assert done.stdout == "done\n", done.stderr
