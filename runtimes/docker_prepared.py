"""Prepared file systems kept as images of this node: the same image and steps need not be prepared again.

Opt-in (`options.cache_prepare`), since steps that fetch what changes, or must run each time, would find yesterday's. The key is
the image's id, the steps, and what they can see of the spec; the task's environment isn't kept. At most
POLAR_DOCKER_PREPARED (16) such images stay, the newest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import Any

from docker.errors import APIError, ImageNotFound

from polar.codec import to_json
from polar.errors import InfraError
from polar.sandbox import LABEL_PURPOSE
from polar.task import Prepare, RuntimeSpec
from runtimes.docker_engine import Engine

REPOSITORY = "polar-prepared"
LABEL = "polar.prepared"
LIMIT_VARIABLE = "POLAR_DOCKER_PREPARED"
LIMIT = 16


def steps_of(spec: RuntimeSpec, labels: dict[str, str]) -> list[Prepare]:
    """The steps that a sandbox with these labels will go through."""
    if labels.get(LABEL_PURPOSE) == "evaluation" and spec.evaluation_prepare is not None:
        return spec.evaluation_prepare
    return spec.prepare


def name_of(steps: list[Prepare]) -> str:
    return hashlib.sha256(to_json(steps)).hexdigest()


def key(image_id: str, spec: RuntimeSpec, steps: list[Prepare]) -> str:
    seen = (image_id, name_of(steps), sorted(spec.env.items()), spec.user, spec.workdir, spec.volumes, spec.network)
    return hashlib.sha256(to_json([*seen, spec.options.get("user")])).hexdigest()[:48]


def find(engine: Engine, tag: str) -> bool:
    try:
        with engine.call(code="runtime_create_failed") as api:
            api.inspect_image(f"{REPOSITORY}:{tag}")
        return True
    except ImageNotFound:
        return False


def keep(engine: Engine, container: str, tag: str) -> None:
    """Raises InfraError: a caller may go on without."""
    if find(engine, tag):
        return
    with engine.call(timeout=300, code="prepare_failed", lane="image") as api:
        own: list[str] = api.inspect_container(container)["Config"]["Env"] or []
        blank = [e.partition("=")[0] + "=" for e in own if not e.startswith("PATH=")]
        labels = {LABEL: tag}
        api.commit(container, repository=REPOSITORY, tag=tag, conf={"Env": blank, "Labels": labels})
    shrink(engine)


def shrink(engine: Engine) -> None:
    with engine.call(code="prepare_failed") as api:
        found: list[dict[str, Any]] = api.images(name=REPOSITORY, filters={"label": LABEL})
        newest = sorted(found, key=lambda i: i["Created"], reverse=True)
        for image in newest[int(os.environ.get(LIMIT_VARIABLE) or LIMIT) :]:
            with contextlib.suppress(APIError):  # a sandbox lies over it
                api.remove_image(image["Id"], force=False)


def checked(state: dict[str, str], steps: list[Prepare]) -> bool:
    """Was the sandbox made of what these steps lead to? Raises InfraError if of what others lead to."""
    if "prepared" not in state:
        return False
    if state["steps"] != name_of(steps):
        raise InfraError("the sandbox was made for other prepare steps", code="prepare_failed", retryable=False)
    return True
