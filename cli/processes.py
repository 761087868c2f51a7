"""Commands that become another process: the rooms of a deployment don't import each other."""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def replace_by(module: str, args: list[str]) -> NoReturn:
    os.execv(sys.executable, [sys.executable, "-m", module, *args])
