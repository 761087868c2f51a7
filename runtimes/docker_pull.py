"""Fetching an image from a registry, with an account where it needs one.

Accounts come from the worker's Docker configuration (`docker login`, credential helpers), or from POLAR_REGISTRY_USERNAME,
POLAR_REGISTRY_PASSWORD and POLAR_REGISTRY (the host they are for; they are sent to no other).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from docker.auth import resolve_repository_name
from docker.errors import APIError
from docker.errors import NotFound as EngineNotFound

from polar.errors import InfraError
from runtimes.docker_engine import Engine

_locks: dict[str, threading.Lock] = {}
# What a registry says of an image that isn't there or isn't for us; trying again doesn't help.
_FINAL = ("denied", "unauthorized", "not found", "manifest unknown", "no basic auth", "authentication required")


def account(image: str) -> dict[str, str] | None:
    """None: the engine's client looks into its own configuration."""
    user, host = os.environ.get("POLAR_REGISTRY_USERNAME"), os.environ.get("POLAR_REGISTRY")
    if user and host and resolve_repository_name(image)[0] == host:
        return {"username": user, "password": os.environ.get("POLAR_REGISTRY_PASSWORD", "")}
    return None


def pull(engine: Engine, image: str, left: Callable[[], float]) -> dict[str, Any]:
    """The image as the engine describes it. `left` tells the seconds left, or raises. Raises InfraError `image_missing`
    or `runtime_create_failed`."""
    with _alone(image, left()):
        try:
            with engine.call(timeout=left(), code="runtime_create_failed", lane="image") as api:
                try:
                    for event in api.pull(image, stream=True, decode=True, auth_config=account(image)):
                        left()
                        if "error" in event:
                            raise _failed(image, str(event["error"]))
                except EngineNotFound:
                    raise
                except APIError as e:
                    if any(w in str(e.explanation).lower() for w in _FINAL):
                        raise _failed(image, str(e.explanation)) from e
                    raise
                return api.inspect_image(image)
        except EngineNotFound as e:
            raise _failed(image, str(e.explanation or e), final=True) from e


@contextlib.contextmanager
def _alone(image: str, seconds: float) -> Iterator[None]:
    lock = _locks.setdefault(image, threading.Lock())
    if not lock.acquire(timeout=seconds):
        raise InfraError(f"image '{image}': it is still being pulled", code="runtime_create_failed")
    try:
        yield
    finally:
        lock.release()


def _failed(image: str, text: str, final: bool = False) -> InfraError:
    final = final or any(w in text.lower() for w in _FINAL)
    code = "image_missing" if final else "runtime_create_failed"
    return InfraError(f"image '{image}': {text}", code=code, retryable=not final)
