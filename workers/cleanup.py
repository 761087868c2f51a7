"""Cleanup: what carries a dead attempt's label goes. Driven by labels, so it needs no memory of who made what."""

from __future__ import annotations

import logging

from polar.errors import NotFound, PolarError
from polar.sandbox import LABEL_ATTEMPT, LABEL_NAMESPACE, LABEL_NODE, LABEL_PURPOSE, LABEL_SESSION
from polar.session import Session
from runtimes.registry import allowed
from runtimes.warm import LABEL_OWNER, WarmRuntime
from workers.context import Context

log = logging.getLogger("polar.cleanup")


def cleanup_attempt(ctx: Context, attempt: str) -> None:
    """Remove every sandbox of `attempt` on this node. Idempotent."""
    removed = _destroy(ctx, {**_mine(ctx), LABEL_ATTEMPT: attempt})
    ctx.store.cleaned(ctx.node, attempt)
    if removed:
        log.info("removed %d sandboxes of %s", removed, attempt)


def sweep(ctx: Context) -> int:
    """Remove sandboxes on this node that no living attempt owns: left by killed workers. Returns how many."""
    removed = 0
    for backend in backends(ctx):
        runtime = ctx.runtime(backend)
        refs = runtime.list(_mine(ctx))
        for ref in refs:
            if not _wanted(ctx, runtime, ref.labels):
                _remove(ctx, backend, ref)
                removed += 1
        runtime.tidy({ref.handle for ref in refs}, lambda labels: _alive(ctx, labels))
    return removed


def destroy_all(ctx: Context) -> int:
    """Remove every sandbox of this deployment on this node: for the end of an embedded stack."""
    return _destroy(ctx, {LABEL_NAMESPACE: ctx.settings.namespace, LABEL_NODE: ctx.node})


def backends(ctx: Context) -> list[str]:
    """The back-ends that work on this machine now."""
    out = []
    for name in allowed(ctx.settings):
        try:
            if ctx.runtime(name).available()[0]:
                out.append(name)
        except PolarError as e:
            log.debug("runtime %s: %s", name, e)
    return out


def _wanted(ctx: Context, runtime: WarmRuntime, labels: dict[str, str]) -> bool:
    owner = labels.get(LABEL_OWNER)
    return runtime.lives(owner) if owner else _alive(ctx, labels)


def _alive(ctx: Context, labels: dict[str, str]) -> bool:
    """Does the attempt that these labels name still need its sandbox?"""
    try:
        s: Session = ctx.store.session(labels.get(LABEL_SESSION, ""))
    except NotFound:
        return False
    if labels.get(LABEL_ATTEMPT) != s.attempt_id or s.state == "DONE":
        return False
    if labels.get(LABEL_PURPOSE) == "evaluation":
        return s.state in ("RUNNING", "POSTRUN")
    return s.state in ("ADMITTED", "INITIALIZING", "READY", "RUNNING")


def _mine(ctx: Context) -> dict[str, str]:
    return {LABEL_NAMESPACE: ctx.settings.namespace, LABEL_NODE: ctx.node}


def _destroy(ctx: Context, labels: dict[str, str]) -> int:
    n = 0
    for backend in backends(ctx):
        for ref in ctx.runtime(backend).list(labels):
            n += _remove(ctx, backend, ref)
    return n


def _remove(ctx: Context, backend: str, ref) -> int:
    runtime = ctx.runtime(backend)
    try:
        if LABEL_OWNER in ref.labels and not runtime.condemn(ref.handle):
            return 0
        sandbox = runtime.attach(ref)
        sandbox.stop()
        sandbox.destroy()
        return 1
    except PolarError as e:
        log.warning("sandbox %s on %s: %s", ref.handle, backend, e)
        return 0
