"""compose/deployment.py as a module (the folder is no package), and the names that tests share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
SECRETS = (
    "REDIS_PASSWORD",
    "S3_ACCESS_KEY",
    "S3_SECRET_KEY",
    "POLAR_API_TOKEN",
    "POLAR_PROXY_TOKEN",
    "POLAR_ENGINE_API_KEY",
)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


deployment = _load("compose_deployment", ROOT / "compose" / "deployment.py")
install = _load("compose_install", ROOT / "compose" / "base" / "install.py")
