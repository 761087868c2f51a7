"""The runtime back-ends by name, one of each per process and deployment."""

from __future__ import annotations

import os
import threading

from polar import plugins
from polar.config import Settings
from polar.sandbox import Runtime

_lock = threading.Lock()
_loaded: dict[tuple[int, str, str], Runtime] = {}


def load_runtime(name: str, settings: Settings) -> Runtime:
    """The back-end `name`, or `module:Class`. Raises InvalidTask for an unknown name or a missing package."""
    # By process: a forked worker must not share its parent's connections and threads.
    key = (os.getpid(), name, os.path.abspath(settings.data_dir))
    with _lock:
        if key not in _loaded:
            _loaded[key] = plugins.load(plugins.RUNTIMES, name, "runtime.backend")(settings)
        return _loaded[key]
