"""The runtime back-ends by name, one of each per process and deployment."""

from __future__ import annotations

import os
import threading

from polar import plugins
from polar.config import Settings
from polar.errors import InvalidTask
from polar.sandbox import Runtime

_lock = threading.Lock()
_loaded: dict[tuple[int, str, str], Runtime] = {}


def allowed(settings: Settings) -> list[str]:
    """Names of the back-ends that a deployment may use."""
    return settings.runtimes or list(plugins.names(plugins.RUNTIMES))


def load_runtime(name: str, settings: Settings) -> Runtime:
    """The back-end `name`, or `module:Class`. Raises InvalidTask for an unknown name or a missing package, and for one
    that the deployment doesn't allow (`Settings.runtimes`)."""
    if settings.runtimes and name not in settings.runtimes:
        allowed = ", ".join(settings.runtimes)
        raise InvalidTask(f"runtime.backend: '{name}' is not allowed in this deployment; allowed: {allowed}")
    # By process: a forked worker must not share its parent's connections and threads.
    key = (os.getpid(), name, os.path.abspath(settings.data_dir))
    with _lock:
        if key not in _loaded:
            _loaded[key] = plugins.load(plugins.RUNTIMES, name, "runtime.backend")(settings)
        return _loaded[key]
