"""A Python that has the project, run as an ordinary user of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtimes.conftest import REPOSITORY

USER = 65534


def ordinary_python(home: Path) -> list[str]:
    """The command line up to `-c`; its argument comes next."""
    if os.geteuid() != 0:
        pytest.skip("all tests run as an ordinary user already")
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    paths = os.pathsep.join([str(REPOSITORY), *(p for p in sys.path if p.endswith("site-packages"))])
    env = ["env", f"HOME={home}", "PYTHONDONTWRITEBYTECODE=1", f"PYTHONPATH={paths}"]
    for python in (sys.executable, "/usr/bin/python3"):
        argv = [*user, *env, python, "-c"]
        tried = subprocess.run([*argv, "import polar.codec, runtimes.local"], capture_output=True, text=True, cwd="/")
        if tried.returncode == 0:
            return argv
    pytest.skip(f"no Python of this machine can be run by others: {tried.stderr.strip()[-200:]}")
