"""What every runtime makes of a spec's other fields."""

from __future__ import annotations

import pytest

from polar.errors import InfraError, UnsupportedSpec
from polar.task import Volume


def test_unknown_options_are_refused(backend):
    with pytest.raises(UnsupportedSpec, match=r"runtime.options.colour.*allowed: "):
        backend.runtime.check(backend.spec(options={"colour": "red"}))


def test_volumes(backend, make, public):
    (public / "data").mkdir()
    (public / "data" / "f").write_text("from the host")
    volumes = [Volume(source=str(public / "data"), target="/data/set")]
    if not backend.boxed:
        with pytest.raises(UnsupportedSpec, match=r"runtime.volumes\[0\]"):
            backend.runtime.check(backend.spec(volumes=volumes))
        return
    r = make(volumes=volumes).exec("cat /data/set/f; echo x > /data/set/f", timeout=30)
    assert r.output.startswith(b"from the host") and r.exit_code != 0
    assert (public / "data" / "f").read_text() == "from the host"


@pytest.mark.parametrize(
    "source", ["/", "/run/docker.sock", "/var/run", "/proc", "relative", "/a/../etc", "DATA", "DATA/sandboxes"]
)
def test_dangerous_volumes_are_refused(backend, source):
    source = source.replace("DATA", backend.settings.data_dir)
    with pytest.raises(UnsupportedSpec, match=r"runtime.volumes\[0\].source"):
        backend.runtime.check(backend.spec(volumes=[Volume(source=source, target="/v")]))


def test_workdir(backend, make):
    if not backend.boxed:
        with pytest.raises(UnsupportedSpec, match=r"runtime\.workdir"):
            backend.runtime.check(backend.spec(workdir="/testbed"))
        return
    box = make(workdir="/testbed/repo")
    box.write("f", b"x")
    assert box.exec("pwd; ls; touch new && echo ok", timeout=30).output.split() == [b"/testbed/repo", b"f", b"ok"]
    box.write("/tests/hidden/t.py", b"judge")
    assert box.exec("cat /tests/hidden/t.py", timeout=30).output == b"judge"


def test_what_a_back_end_can_t_do_is_refused(backend):
    impossible = {
        "local-plain": {"image": "x", "gpus": 1, "user": "0", "workdir": "/x", "network": "none"},
        "local-bwrap": {"image": "x", "gpus": 1, "user": "somebody"},
        "apptainer": {"image": "", "user": "somebody", "workdir": "/a/../b"},
        "docker": {"image": "", "workdir": "/a/../b"},
    }[backend.id]
    for name, value in impossible.items():
        with pytest.raises(UnsupportedSpec, match=rf"runtime\.{name}"):
            backend.runtime.check(backend.spec(**{name: value}))


def test_no_rights_are_held_or_gained(backend, make):
    if not backend.boxed:
        pytest.skip("plain processes have the worker's rights, and say so")
    status = make().exec("grep -E 'Cap(Eff|Prm|Bnd)|NoNewPrivs|Seccomp:' /proc/self/status", timeout=30).output.split()
    assert status[1:6:2] == [b"0" * 16] * 3 and status[7] == b"1" and status[9] == b"2"


def test_user(backend, make):
    wished = {"local-bwrap": "1234:1235", "apptainer": "root", "docker": "1000:1000"}.get(backend.id)
    if wished is None:
        pytest.skip("refused, as another test says")
    box = make(user=wished)
    r = box.exec("id -u; touch mine && echo ok; touch ~/mine && echo ok", timeout=30)
    assert r.output.split() == [{"root": "0"}.get(wished, wished.split(":")[0]).encode(), b"ok", b"ok"]
    box.write("up", b"x", mode=0o600)
    assert box.exec("cat up; rm up mine && echo gone", timeout=30).output == b"xgone\n"


def test_a_sandbox_that_is_gone_says_nothing_about_the_agent(make, tmp_path):
    """Not that its files are missing: somebody else's clean-up may have taken it."""
    box = make()
    box.write("answer", b"42")
    box.destroy()
    for call in (
        lambda: box.download("answer", tmp_path / "answer", limit=1000),
        lambda: box.changes(tmp_path / "c.tar", under=".", baseline=b"", limit=1000),
        lambda: box.baseline("."),
        lambda: box.exec("true", timeout=10),
    ):
        with pytest.raises(InfraError):
            call()
