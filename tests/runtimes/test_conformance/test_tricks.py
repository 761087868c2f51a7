"""What an agent leaves at a path that is collected may cost it its files, and never be a failure of the machinery, which
would give it another attempt."""

from __future__ import annotations

import os

import pytest

from polar.errors import NotFound
from polar.objects import open_objects
from polar.session import Session
from workers.collect import collect, restore

_SOCKET = "import socket; socket.socket(socket.AF_UNIX).bind('trick')"
# Scripts that put something at `trick`, and whether there is something then. With a script inside a folder `in/trick`.
NOTHING = {
    "self-link": "ln -s trick trick",
    "circle": "ln -s other trick; ln -s trick other",
    "long link": "ln -s $(printf %0300d 0) trick",
    "longer link": "ln -s $(printf %0300d 0)/$(printf %03000d 0) trick",
    "dangling link": "ln -s nothing/at/all trick",
    "below a link to itself": "ln -s self self; ln -s self/x trick",
    "below a file": "echo x >file; ln -s file/x trick",
}
SOMETHING = {
    "pipe": "mkfifo trick",
    "socket": f'python3 -c "{_SOCKET}"',
    "link to a pipe": "mkfifo pipe; ln -s pipe trick",
    "unreadable file": "echo x >trick; chmod 000 trick",
    "unreadable folder": "mkdir trick; echo x >trick/f; chmod 000 trick",
    "folder without search": "mkdir trick; echo x >trick/f; chmod 400 trick",
    "folder without listing": "mkdir trick; echo x >trick/f; chmod 100 trick",
}
CLOSED = {
    "below an unreadable folder": "mkdir -p d/trick; echo x >d/trick/f; ln -s d/trick trick; chmod 000 d",
    "below a folder without search": "mkdir -p d/trick; echo x >d/trick/f; ln -s d/trick trick; chmod 400 d",
}
ALL = {**NOTHING, **SOMETHING, **CLOSED}


@pytest.fixture
def place(box):
    """A fresh folder in the shared sandbox, whose names are told relative to the working directory."""
    name = f"tricks-{os.urandom(4).hex()}"
    yield name
    box.exec(f"chmod -R u+rwx {name}; rm -rf {name}", timeout=60)


def left(box, place: str, script: str) -> None:
    done = box.exec(f"mkdir {place} && cd {place} && {script}", timeout=60)
    assert done.exit_code == 0, done.output


@pytest.fixture(params=ALL)
def name(request) -> str:
    return request.param


def test_a_trick_at_an_artifact_s_path(box, place, tmp_path, name):
    left(box, place, ALL[name])
    path, target = f"{place}/trick", tmp_path / "out"
    try:
        cut = box.download(path, target, limit=1000)
    except NotFound:
        assert name not in SOMETHING
    else:
        assert name not in NOTHING
        assert cut or target.exists()
    s = Session(session_id="s1", task_id="t1", index=0, state="RUNNING", attempt=1)
    objects = open_objects(f"file://{tmp_path}/objects")
    (tmp_path / "c").mkdir()
    collected, artifacts = collect(objects, box, s, [path, "no/such"], tmp_path / "c", 1000)
    assert [c.path for c in collected] == [a.name for a in artifacts]
    if name in SOMETHING:
        (kept,) = collected
        assert restore(objects, collected, tmp_path)[path].exists()
        assert not (name.endswith(("pipe", "socket")) and not kept.truncated)
    if name in NOTHING:
        assert collected == []


def test_a_trick_at_the_folder_of_the_changes(box, place, tmp_path, name):
    left(box, place, ALL[name])
    try:
        box.changes(tmp_path / "c.tar", under=f"{place}/trick", baseline=b"", limit=1 << 20)
    except NotFound:
        return
    # Docker and Podman read as root, and tell of a pipe as of an empty folder.
    assert "folder" in name or (box.ref.backend == "docker" and name in SOMETHING)
