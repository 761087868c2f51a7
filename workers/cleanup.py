"""Cleanup: what carries a dead attempt's label goes. Driven by labels, so it needs no memory of who made what."""

from __future__ import annotations

import logging

from msgspec.structs import replace

from polar.errors import NotFound, PolarError
from polar.sandbox import LABEL_ATTEMPT, LABEL_NAMESPACE, LABEL_NODE, LABEL_PURPOSE, LABEL_SESSION, Sandbox, SandboxRef
from polar.session import Session
from runtimes.registry import allowed
from runtimes.warm import LABEL_OWNER, WarmRuntime, WarmRuntimes
from workers.context import Context

log = logging.getLogger("polar.cleanup")

GONE_SECONDS = 3600.0  # a node that is silent for so long is not expected back: nothing is kept in the store for it


def discard(sandbox: Sandbox) -> None:
    """Remove a sandbox that its stage is done with. Never raises: what was worked out in it counts, and the sweep takes what
    is left once no living attempt needs it."""
    try:
        sandbox.destroy()
    except Exception as e:
        log.warning("sandbox %s is left to the sweep: %s: %s", sandbox.ref.handle, type(e).__name__, e)


def cleanup_attempt(ctx: Context, attempt: str) -> None:
    """Remove every sandbox of `attempt` on this node. Idempotent."""
    removed = _destroy(ctx, {**_of(ctx, ctx.node), LABEL_ATTEMPT: attempt})
    ctx.store.cleaned(ctx.node, attempt)
    if removed:
        log.info("removed %d sandboxes of %s", removed, attempt)


def sweep(ctx: Context) -> int:
    """Remove sandboxes on this machine that no living attempt owns: left by killed workers of this node, and of nodes that
    give no sign of life, such as this one under a former name. Returns how many."""
    removed = 0
    for backend in backends(ctx):
        try:
            removed += _swept(ctx, backend)
        except Exception as e:  # those of the others must go all the same
            log.warning("sweep of %s: %s: %s", backend, type(e).__name__, e)
    return removed


def _swept(ctx: Context, backend: str) -> int:
    runtime = ctx.runtime(backend)
    removed = _swept_of(ctx, runtime, ctx.node)
    for node in _former(ctx, runtime):
        removed += _swept_of(ctx, _seen_by(ctx, node, runtime), node)
    return removed


def _swept_of(ctx: Context, runtime: WarmRuntime, node: str) -> int:
    removed, refs = 0, runtime.list(_of(ctx, node))
    for ref in refs:
        if not _wanted(ctx, runtime, ref.labels) and _remove(runtime, ref):
            removed += 1
            ctx.store.cleaned(node, ref.labels.get(LABEL_ATTEMPT, ""))
    runtime.tidy({ref.handle for ref in refs}, lambda labels: _alive(ctx, labels))
    return removed


def _former(ctx: Context, runtime: WarmRuntime) -> list[str]:
    """Nodes without a sign of life of which something is here, or that are gone and still have a ledger. Only those that this
    store knows: another deployment on the same engine may have the same namespace."""
    now = ctx.store.now()
    silent = {name: now - told["beat"] for name, told in ctx.store.nodes().items() if name != ctx.node}
    silent = {name: age for name, age in silent.items() if age > ctx.settings.node_timeout_seconds}
    if not silent:
        return []
    here = {ref.labels.get(LABEL_NODE) for ref in runtime.list({LABEL_NAMESPACE: ctx.settings.namespace})}

    def ledger(name: str) -> bool:
        return bool(ctx.store.redis.exists(ctx.keys.warm(name, runtime.name)))

    return [name for name, age in silent.items() if name in here or (age > GONE_SECONDS and ledger(name))]


def _seen_by(ctx: Context, node: str, runtime: WarmRuntime) -> WarmRuntime:
    """The back-end with the ledger of that node, for which nothing is kept warm here."""
    settings = replace(ctx.settings, warm_sandboxes=0)
    return WarmRuntimes(settings, ctx.store.redis, node).over(runtime.name, runtime.inner)


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


def _of(ctx: Context, node: str) -> dict[str, str]:
    return {LABEL_NAMESPACE: ctx.settings.namespace, LABEL_NODE: node}


def _destroy(ctx: Context, labels: dict[str, str]) -> int:
    runtimes = [ctx.runtime(backend) for backend in backends(ctx)]
    return sum(_remove(runtime, ref) for runtime in runtimes for ref in runtime.list(labels))


def _remove(runtime: WarmRuntime, ref: SandboxRef) -> bool:
    try:
        if LABEL_OWNER in ref.labels and not runtime.condemn(ref.handle):
            return False
        sandbox = runtime.attach(ref)
        sandbox.stop()
        sandbox.destroy()
        return True
    except Exception as e:  # the others must go all the same
        log.warning("sandbox %s on %s: %s: %s", ref.handle, runtime.name, type(e).__name__, e)
        return False
