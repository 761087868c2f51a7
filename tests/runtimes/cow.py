"""Sandboxes of the `local` runtime with a copy-on-write root, for the tests of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import bwrap, holder, local_cow, procs
from runtimes.local import LocalRuntime

FOUND = bwrap.find()
COW = {"isolation": "bwrap", "root": "overlay"}
SPEC = RuntimeSpec(options=COW)
needs_bwrap = pytest.mark.skipif(isinstance(FOUND, str), reason=f"no working bubblewrap: {FOUND}")
WRITE = """
set -e; for f in /usr/bin/polar-x /etc/polar-x /opt/polar-x /var/polar-x /polar-x /home/polar-x; do echo new >$f; done
rm /usr/bin/env; echo more >>/etc/hostname; cp /usr/bin/tail /usr/bin/polar-tail; rm /usr/bin/tail; mkdir -p /usr/local/lib/polar-deep/er
"""
SEE = (
    "cat /usr/bin/polar-x /etc/polar-x /opt/polar-x /var/polar-x /polar-x /home/polar-x | sort | uniq -c; ls /usr/bin/env "
    "/usr/bin/tail 2>&1 | wc -l; tail -n1 /etc/hostname 2>/dev/null; polar-tail -n1 /etc/hostname; ls -d /usr/local/lib/*/er"
)
SEEN = b"6 new 2 more /usr/local/lib/polar-deep/er"
# A sandbox in a process of its own: data folder, spec, commands, between which the holder ends.
ONE = """
import sys
from polar.codec import from_json
from polar.config import Settings
from polar.task import RuntimeSpec
from runtimes import holder
from runtimes.local import LocalRuntime
runtime = LocalRuntime(Settings(data_dir=sys.argv[1]))
box = runtime.create(from_json(sys.argv[2], RuntimeSpec), labels={"a": "1"}, proxy=None, timeout=60)
print(box.ref.state["root"], flush=True)
try:
    for command in sys.argv[3:]:
        print(box.exec(command, timeout=60).output.decode(), flush=True)
        holder.end(holder.find(box._folder))
finally: box.destroy()
"""


@pytest.fixture(scope="module", name="runtime")
def cow_runtime(tmp_path_factory) -> LocalRuntime:
    made = LocalRuntime(Settings(data_dir=str(tmp_path_factory.mktemp("data"))))
    if why := local_cow.support(made.data_dir).missing():
        pytest.skip(f"no copy-on-write root on this machine: {why}")
    return made


@pytest.fixture(name="make")
def cow_make(runtime):
    made = []

    def create(**fields):
        fields["options"] = COW | fields.get("options", {})
        made.append(runtime.create(RuntimeSpec(**fields), labels={"a": "1"}, proxy=None, timeout=30))
        return made[-1]

    yield create
    for box in made:
        box.destroy()
    assert holders(runtime.data_dir) == [] and list(runtime.root.iterdir()) == []
    assert str(runtime.data_dir) not in Path("/proc/self/mountinfo").read_text()


def holders(data_dir: Path) -> list[int]:
    """Of all sandboxes below, also half-made ones."""
    return [p for p in procs.scan() if procs.environ_contains(p, f"{holder.MARK}={data_dir}".encode())]


def ok(box, command, **more) -> bytes:
    r = box.exec(command, timeout=60, **more)
    assert r.exit_code == 0, r.output
    return b" ".join(r.output.split())
