"""What an agent changed of a copy-on-write root, brought into a fresh sandbox."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from polar import changes
from polar.errors import NotFound
from tests.runtimes.cow import cow_make, cow_runtime, needs_bwrap, ok  # noqa: F401

pytestmark = needs_bwrap

CHANGE = """
set -e; cd /usr/share; mkdir -p polar/was; echo x >polar/was/x; rm -r perl; mkdir perl; echo mine >perl/mine
rm -r bash-completion; echo file >bash-completion; rm -r /usr/share/locale; ln -s /usr/share/polar /usr/share/locale
rm /usr/bin/env /etc/hostname; echo h >/etc/hostname; rm /etc/shells; mkdir /etc/shells; echo s >/etc/shells/s
chmod 700 /usr/local; echo v >/var/lib/v; echo d >/var/lib/dpkg/polar; echo t >/top; mkdir /data; echo d >/data/d; rm /sbin
"""
SHOW = """
cd /; find usr/share/polar usr/share/perl usr/share/bash-completion usr/share/locale usr/bin/env etc/hostname etc/shells \
  usr/local var/lib top data sbin bin ! -path 'var/lib/dpkg/*' -printf '%p %y %m %l\n' 2>&1 | sort
cat usr/share/perl/* usr/share/bash-completion etc/hostname etc/shells/s var/lib/v var/lib/dpkg/polar top data/d
"""


@pytest.fixture
def shares():
    for path in ("/usr/share/perl", "/usr/share/bash-completion", "/usr/share/locale", "/etc/shells", "/var/lib/dpkg"):
        if not os.path.exists(path) or not os.path.islink("/sbin"):
            pytest.skip(f"this machine has no '{path}', or /sbin is no link")


def test_all_changes_in_a_fresh_sandbox(make, tmp_path, shares):
    box, fresh = make(), make()
    baseline = box.baseline("/")
    ok(box, CHANGE)
    final = ok(box, SHOW)
    box.stop()
    assert box.changes(tmp_path / "c.tar", under="/", baseline=baseline, limit=1 << 22) is False
    assert ok(fresh, f"({SHOW}) || true") != final
    changes.apply(fresh, tmp_path / "c.tar", "/", timeout=60)
    assert ok(fresh, SHOW) == final
    gone = set(changes.removed(tmp_path / "c.tar"))
    assert {"usr/bin/env", "sbin"} <= gone and "usr/share/locale/locale.alias" in gone
    assert not {p for p in changes.paths(tmp_path / "c.tar") if p.split("/")[0] in ("proc", "dev", "run", "bin", "lib")}


@pytest.mark.parametrize("under", ["/usr", "/usr/share", "/bin", "/var", "/usr/local"])
def test_changes_below_a_folder(make, tmp_path, under, shares):
    box, fresh = make(), make()
    ok(
        box,
        "echo b >/usr/bin/polar; echo l >/usr/local/polar; echo s >/usr/share/polar; echo v >/var/polar; echo e >/etc/x",
    )
    ok(box, "echo d >/var/lib/dpkg/polar; rm -r /usr/bin/env /usr/share/perl")
    box.stop()
    box.changes(tmp_path / "c.tar", under=under, baseline=box.baseline(under), limit=1 << 22)
    changes.apply(fresh, tmp_path / "c.tar", under, timeout=60)
    see = "cat polar local/polar share/polar lib/dpkg/polar; ls bin/env env share/perl perl"
    there = fresh.exec(see, cwd=under, timeout=60).output
    assert there == box.exec(see, cwd=under, timeout=60).output and there.count(b"No such file") in (6, 7, 8)
    assert "etc/x" not in str(changes.paths(tmp_path / "c.tar"))


def test_what_did_not_change_is_not_told(make, tmp_path):
    box = make()
    ok(box, "cat /etc/passwd /usr/bin/env >/dev/null; ls -R /usr/share >/dev/null 2>&1 || true")
    box.stop()
    box.changes(tmp_path / "c.tar", under="/usr", baseline=box.baseline("/usr"), limit=1 << 20)
    assert changes.paths(tmp_path / "c.tar") == changes.removed(tmp_path / "c.tar") == []
    with pytest.raises(NotFound):
        box.changes(tmp_path / "c.tar", under="/usr/nothing", baseline=b"", limit=1 << 20)
    ok(box, "rm -r /usr/include")
    with pytest.raises(NotFound):
        box.changes(tmp_path / "c.tar", under="/usr/include", baseline=b"", limit=1 << 20)


def test_many_and_wide_changes(make, tmp_path):
    box, fresh = make(), make()
    ok(box, "mkdir /usr/lib/wide; cd /usr/lib/wide; for i in $(seq 1200); do mkdir d$i; echo $i >d$i/f; done")
    box.stop()
    assert not box.changes(tmp_path / "c.tar", under="/usr", baseline=b"", limit=1 << 22)
    changes.apply(fresh, tmp_path / "c.tar", "/usr", timeout=60)
    assert ok(fresh, "cat /usr/lib/wide/*/f | wc -l; cat /usr/lib/wide/d1200/f") == b"1200 1200"


def test_a_package_is_installed(make, tmp_path):
    if os.geteuid() != 0 or not shutil.which("dpkg-deb") or not os.path.isdir("/var/lib/dpkg"):
        pytest.skip("this machine's packages aren't Debian's, or these tests run as an ordinary user")
    package = tmp_path / "p"
    (package / "DEBIAN").mkdir(parents=True)
    (package / "DEBIAN" / "control").write_text(
        "Package: polar-test\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.com>\nDescription: test\n"
    )
    (package / "DEBIAN" / "postinst").write_text(
        "#!/bin/sh\nupdate-alternatives --install /usr/bin/pt pt /opt/pt/run 5\n"
    )
    (package / "DEBIAN" / "postinst").chmod(0o755)
    (package / "opt" / "pt").mkdir(parents=True)
    (package / "opt" / "pt" / "run").write_text("#!/bin/sh\necho installed\n")
    (package / "opt" / "pt" / "run").chmod(0o755)
    subprocess.run(
        ["dpkg-deb", "--root-owner-group", "-b", package, tmp_path / "p.deb"], check=True, capture_output=True
    )
    box, fresh = make(), make()
    box.upload(tmp_path / "p.deb", "p.deb")
    ok(box, "dpkg -i p.deb")
    box.stop()
    assert ok(box, "pt; dpkg-query -W polar-test") == b"installed polar-test 1"
    assert subprocess.run(["dpkg-query", "-W", "polar-test"], capture_output=True).returncode == 1
    box.changes(tmp_path / "c.tar", under="/", baseline=b"", limit=1 << 24)
    changes.apply(fresh, tmp_path / "c.tar", "/", timeout=60)
    assert ok(fresh, "pt; dpkg-query -W polar-test") == b"installed polar-test 1"
