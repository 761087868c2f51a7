"""What an agent made of a sandbox, brought into a fresh one: the same on every runtime."""

from __future__ import annotations

import tarfile

import pytest

from polar import changes
from polar.errors import InfraError, NotFound
from polar.task import AgentSpec, EvaluatorSpec, TaskRequest
from workers.judging import evaluation_spec

PREPARE = """
mkdir -p repo/sub repo/gone && cd repo && echo one >kept && echo two >edited && echo three >removed &&
echo a >sub/a && echo b >gone/b && ln -s kept link && mkdir was_folder && echo x >was_folder/x && echo y >was_file
"""
WORK = """
cd repo && echo more >>edited && rm removed && rm -r gone && mkdir -p 'new dir/deep' && echo n >'new dir/deep/n ü' &&
chmod 755 sub/a && ln -s /etc/hostname outside && ln kept hard && rm -r was_folder && echo f >was_folder &&
rm was_file && mkdir was_file && echo g >was_file/g && rm link && mkdir link && echo in >link/in && mkfifo pipe &&
printf '%s' 'a\nb' >"$(printf 'odd\nname')" && mkdir empty && rm sub/a && echo a2 >sub/a
"""
# Kinds, modes of files, link targets and contents of everything but the pipe.
SHOW = """
cd repo && find . ! -name pipe -exec sh -c 'for p; do
  if [ -L "$p" ]; then echo "$p -> $(readlink "$p")";
  elif [ -f "$p" ]; then echo "$p $(stat -c %a "$p") $(cat "$p")"; else echo "$p/"; fi; done' sh {} + | sort
"""


def show(box) -> str:
    r = box.exec(SHOW, timeout=60)
    assert r.exit_code == 0, r.output
    return r.output.decode()


def names(archive) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def prepared(make):
    box = make()
    assert box.exec(PREPARE, timeout=60).exit_code == 0
    return box


def test_a_fresh_sandbox_is_brought_into_the_final_state(make, tmp_path):
    box = prepared(make)
    baseline = box.baseline("repo")
    r = box.exec(WORK, timeout=60)
    assert r.exit_code == 0, r.output
    final = show(box)
    box.stop()
    assert box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 20) is False
    fresh = prepared(make)
    assert show(fresh) != final
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60)
    assert show(fresh) == final
    assert {"removed", "gone", "gone/b"} <= set(changes.removed(tmp_path / "c.tar"))


def test_excluded_paths_stay_as_they_are(make, tmp_path):
    box = prepared(make)
    baseline = box.baseline("repo")
    assert box.exec("cd repo; echo bad >edited; rm -r sub; echo fine >kept", timeout=60).exit_code == 0
    box.stop()
    box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 20)
    fresh = prepared(make)
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60, exclude=("edited", "sub"))
    assert fresh.exec("cat repo/kept repo/edited repo/sub/a", timeout=60).output == b"fine\ntwo\na\n"


def test_more_than_the_limit_is_told(make, tmp_path):
    box = prepared(make)
    baseline = box.baseline("repo")
    assert box.exec("head -c 3000000 /dev/zero >repo/big; truncate -s 100G repo/huge", timeout=60).exit_code == 0
    box.stop()
    assert box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 20) is True
    assert (tmp_path / "c.tar").stat().st_size < 2 << 20


def test_many_changes(make, tmp_path):
    box = prepared(make)
    assert box.exec("cd repo; for i in $(seq 500); do echo $i >sub/f$i; done", timeout=60).exit_code == 0
    baseline = box.baseline("repo")
    assert box.exec("cd repo; for i in $(seq 2 2 500); do rm sub/f$i; done; echo x >sub/f1", timeout=60).exit_code == 0
    final = show(box)
    box.stop()
    assert box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 22) is False
    fresh = prepared(make)
    assert fresh.exec("cd repo; for i in $(seq 500); do echo $i >sub/f$i; done", timeout=60).exit_code == 0
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60)
    assert show(fresh) == final


def test_no_such_folder(make, tmp_path):
    box = make()
    with pytest.raises(NotFound):
        box.changes(tmp_path / "c.tar", under="nothing", baseline=b"", limit=1 << 20)


def test_links_of_the_fresh_sandbox_lead_no_file_elsewhere(make, tmp_path):
    """The agent had a folder where the fresh sandbox has a link to one that it must not reach."""
    box = make()
    assert box.exec("mkdir -p repo/lib && echo planted >repo/lib/tool", timeout=60).exit_code == 0
    box.stop()
    box.changes(tmp_path / "c.tar", under="repo", baseline=b"", limit=1 << 20)
    fresh = make()
    assert (
        fresh.exec(
            "mkdir -p repo trusted && echo good >trusted/tool && ln -s ../trusted repo/lib", timeout=60
        ).exit_code
        == 0
    )
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60)
    assert fresh.exec("cat trusted/tool repo/lib/tool", timeout=60).output == b"good\nplanted\n"


def test_many_single_files(make, tmp_path):
    box = make()
    assert box.exec("for i in $(seq 300); do echo $i >f$i; done; ln f1 hard; ln -s f2 soft", timeout=60).exit_code == 0
    box.stop()
    assert box.changes(tmp_path / "c.tar", under=".", baseline=b"", limit=1 << 22) is False
    fresh = make()
    changes.apply(fresh, tmp_path / "c.tar", ".", timeout=60)
    r = fresh.exec("cat f300 hard soft; ls | wc -l", timeout=60)
    assert r.output.split() == [b"300", b"1", b"2", b"302"]


def test_a_wide_tree(make, tmp_path):
    """As package managers make them: more folders side by side than a process may have files open."""
    box = make()
    made = box.exec("mkdir -p repo/modules && cd repo/modules && mkdir $(seq 1200) && touch 1/a 1200/b", timeout=60)
    assert made.exit_code == 0
    baseline = box.baseline("repo")
    assert box.exec("rm -r repo/modules/1; touch repo/modules/600/c", timeout=60).exit_code == 0
    box.stop()
    assert box.changes(tmp_path / "c.tar", under="repo", baseline=baseline, limit=1 << 22) is False
    assert {"modules/1", "modules/1/a"} <= set(changes.removed(tmp_path / "c.tar"))
    fresh = make()
    fresh.write("repo/x", b"")
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60)
    assert fresh.exec("ls repo/modules/*/[a-c]; ls repo/modules | wc -l", timeout=60).output.split() == [
        b"repo/modules/1200/b", b"repo/modules/600/c", b"1199",
    ]  # fmt: skip


def test_upward_steps_end_at_the_sandbox_s_root(backend, make, tmp_path):
    if not backend.boxed:
        pytest.skip("plain processes see the host's folders, and say so")
    (tmp_path / "secret").write_text("the host's")
    box = make()
    for steps in ("/../../../../../../../../..", "../../../../../../../../.."):
        with pytest.raises((NotFound, InfraError)):
            box.changes(tmp_path / "c.tar", under=f"{steps}{tmp_path}", baseline=b"", limit=1 << 20)


def test_a_folder_named_through_links(backend, make, tmp_path):
    """The image's or the agent's: what changed is told all the same, or that there is no such folder."""
    box = make()
    made = "mkdir -p real/sub && ln -s real link && ln -s $PWD/link/sub deep && ln -s circle circle; cd deep; echo x >f"
    assert box.exec(made, timeout=60).exit_code == 0
    folders = {"link/sub", "deep", "link/../real/sub"}
    if backend.boxed:
        assert box.exec("cp /bin/sh /lib/polar-f", timeout=60).exit_code == 0
    baselines = {f: box.baseline(f) for f in folders}
    box.stop()
    for folder in folders:
        assert changes.decode(baselines[folder]) == ["f"], folder
        assert box.changes(tmp_path / "c.tar", under=folder, baseline=b"", limit=1 << 20) is False
        assert "files/f" in names(tmp_path / "c.tar"), folder
    if backend.boxed:
        box.changes(tmp_path / "c.tar", under="/lib", baseline=b"", limit=1 << 22)
        assert "files/polar-f" in names(tmp_path / "c.tar")
    with pytest.raises(NotFound):
        box.changes(tmp_path / "c.tar", under="circle", baseline=b"", limit=1 << 20)


def test_an_agent_that_filled_its_disk_is_judged(backend, make, tmp_path):
    agent = make(disk_mb=30)
    filled = "cd repo && i=0; while [ $i -lt 26 ]; do head -c 1000000 /dev/zero >f$i || exit; i=$((i+1)); done"
    assert agent.exec("mkdir repo", timeout=60).exit_code == 0
    assert agent.exec(filled, timeout=60).exit_code == 0
    agent.stop()
    assert agent.changes(tmp_path / "c.tar", under="repo", baseline=b"", limit=1 << 26) is False
    task = TaskRequest(
        task_id="t",
        instruction="x",
        agent=AgentSpec(harness="shell", command="true"),
        runtime=backend.spec(disk_mb=30),
        evaluator=EvaluatorSpec(name="command_judge"),
    )
    fresh = make(disk_mb=evaluation_spec(task).disk_mb)
    assert fresh.exec("mkdir repo", timeout=60).exit_code == 0
    changes.apply(fresh, tmp_path / "c.tar", "repo", timeout=60)
    assert fresh.exec("ls repo | wc -l", timeout=60).output == b"26\n"
