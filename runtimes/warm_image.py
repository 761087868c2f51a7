"""What an image's name means right now: a sandbox that waited must not be of what it meant before."""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from polar.config import Settings
from polar.errors import InfraError
from polar.sandbox import Runtime
from polar.task import RuntimeSpec

TIMEOUT = 30.0  # seconds


def image_id(runtime: Runtime, settings: Settings, spec: RuntimeSpec) -> str | None:
    """None: it can't be told, so nothing of this spec is kept. A back-end of somebody's own tells it by a method
    `image_id(spec)`. Raises InfraError, and `image_missing` for one that isn't there."""
    if spec.image is None:
        return ""
    if runtime.name == "docker":
        return _docker(spec.image)
    if runtime.name == "apptainer":
        return _apptainer(runtime, settings, spec.image)
    ask = getattr(runtime, "image_id", None)
    return ask(spec) if ask else None


@cache
def _engine() -> Any:
    from runtimes.docker_engine import Engine

    return Engine()


def _docker(image: str) -> str:
    from docker.errors import ImageNotFound

    try:
        with _engine().call(timeout=TIMEOUT, code="runtime_create_failed") as api:
            return api.inspect_image(image)["Id"]
    except ImageNotFound as e:
        raise InfraError(f"image '{image}' is not on this node", code="image_missing", retryable=False) from e


def _apptainer(runtime: Any, settings: Settings, image: str) -> str:
    """The folder it is unpacked to, and which folder that is."""
    from runtimes import apptainer_cli, apptainer_source
    from runtimes.apptainer import SHELF_VARIABLE

    shelf = os.environ.get(SHELF_VARIABLE) or Path(settings.data_dir).resolve() / "apptainer" / "shelf"
    source = apptainer_source.parse(image, Path(shelf).resolve(), settings.volume_roots)
    try:
        found = runtime.images.get(apptainer_cli.need(), source, "never", time.monotonic() + TIMEOUT)
        where = os.stat(os.path.realpath(found.rootfs))
    except OSError as e:
        raise InfraError(f"image '{image}': {e}", code="image_missing") from e
    return f"{found.key}:{where.st_dev}:{where.st_ino}"
