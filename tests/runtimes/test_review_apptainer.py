"""Attacks on Apptainer sandboxes that were once possible."""

from __future__ import annotations

import os
import subprocess

import pytest

from polar.errors import InfraError
from runtimes import procs
from runtimes.apptainer_layer import _MARK, Memory


def test_a_process_with_the_old_holders_number_is_not_the_holder(tmp_path):
    """An agent may know its sandbox's name, and what it lets the worker read as its files is anything then."""
    layer = Memory(tmp_path, "sandbox-x", tmp_path, 1 << 20)
    with subprocess.Popen(["sleep", "60"], env={_MARK: "sandbox-x", "PATH": os.defpath}) as forged:
        try:
            found = procs.read(forged.pid)
            assert found is not None
            for text in (f"{found.pid}", f"{found.pid}\n", f"{found.pid} {found.start - 1}"):
                layer._pid.write_text(text)
                with pytest.raises(InfraError, match="gone"):
                    layer.open()
            layer._pid.write_text(f"{found.pid} {found.start}")
            layer.open()
        finally:
            forged.kill()
