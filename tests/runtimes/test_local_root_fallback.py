"""Where a copy-on-write root can't be made: read-only system folders, said; or an error, where it was asked for."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from polar.codec import to_json
from polar.config import Settings
from polar.errors import InfraError, UnsupportedSpec
from polar.task import RuntimeSpec
from runtimes import holder
from runtimes.local import LocalRuntime
from tests.runtimes.conftest import REPOSITORY
from tests.runtimes.cow import COW, ONE, SPEC, cow_runtime, needs_bwrap  # noqa: F401

pytestmark = needs_bwrap


def test_without_overlays(tmp_path, monkeypatch, caplog):
    def start(*_):
        raise holder.Impossible("not on this machine")

    monkeypatch.setattr(holder, "start", start)
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    with pytest.raises(InfraError, match="not on this machine") as e:
        runtime.create(SPEC, labels={}, proxy=None, timeout=10)
    assert e.value.code == "runtime_create_failed" and not e.value.retryable
    with caplog.at_level(logging.WARNING, "polar.local"):
        box = runtime.create(RuntimeSpec(options={"isolation": "bwrap"}), labels={}, proxy=None, timeout=10)
    assert box.ref.state["root"] == "read-only" and "not on this machine" in runtime.available()[1]
    assert box.exec("touch /usr/bin/polar-x", timeout=30).exit_code != 0
    box.destroy()
    assert list(runtime.root.iterdir()) == []


def test_an_unsuited_file_system(runtime, tmp_path):
    """An overlay's changes can't lie on an overlay, as in a container without a volume."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    for name in ("l", "u", "w", "m"):
        (tmp_path / name).mkdir()
    script = f"cd {tmp_path} && mount -t overlay none -o lowerdir=l,upperdir=u,workdir=w m && cd {REPOSITORY} && "
    for options, said in (({"isolation": "bwrap"}, "read-only"), (COW, "no copy-on-write root on this machine")):
        spec = to_json(RuntimeSpec(options=options)).decode()
        run = f"exec {sys.executable} -c '{ONE}' {tmp_path}/m/data '{spec}' 'touch /usr/bin/x; echo here >f; cat f'"
        r = subprocess.run(["unshare", "-m", "sh", "-c", script + run], capture_output=True, text=True, timeout=60)
        assert said in r.stdout + r.stderr and "Traceback" not in r.stdout
        assert ("here" in r.stdout) == (said == "read-only")


def test_trouble_is_no_reason_for_another_root(tmp_path, monkeypatch):
    """What may work the next time isn't taken for what this machine can't do."""
    monkeypatch.setattr(holder, "python", lambda: "/nonexistent/python")
    runtime = LocalRuntime(Settings(data_dir=str(tmp_path)))
    with pytest.raises(InfraError) as e:
        runtime.create(RuntimeSpec(options={"isolation": "bwrap"}), labels={}, proxy=None, timeout=10)
    assert e.value.code == "runtime_create_failed" and e.value.retryable
    assert list(runtime.root.iterdir()) == []


def test_the_option(runtime):
    with pytest.raises(UnsupportedSpec, match=r"runtime\.options\.root"):
        runtime.check(RuntimeSpec(options={"isolation": "none", "root": "overlay"}))
    with pytest.raises(UnsupportedSpec, match=r"runtime\.options: root.*'read-only'"):
        runtime.check(RuntimeSpec(options={"root": "writable"}))
    with pytest.raises(UnsupportedSpec, match=r"runtime\.workdir"):
        runtime.check(RuntimeSpec(workdir="/usr/src/app"))
