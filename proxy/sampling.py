"""The sampling of a call: the policy's, pinned by the task."""

from __future__ import annotations

import hashlib
from typing import Any

from polar.store.capture import Grant
from proxy.neutral import Request

_HONOURED = {"temperature": (0.0, 10.0), "top_p": (1e-6, 1.0), "min_p": (0.0, 1.0)}


def effective(grant: Grant, request: Request, row_limit: int, room: int) -> dict[str, Any]:
    """What is really used; `room` tokens are left in the context (at least 1)."""
    pinned = grant.sampling
    out: dict[str, Any] = {
        "temperature": pinned.temperature,
        "top_p": pinned.top_p,
        "top_k": pinned.top_k,
        "min_p": pinned.min_p,
    }
    seed = pinned.seed
    if pinned.honour_harness:
        for name, (low, high) in _HONOURED.items():
            if name in request.wishes:
                out[name] = float(min(max(request.wishes[name], low), high))
        if "top_k" in request.wishes:
            out["top_k"] = min(int(request.wishes["top_k"]), 1 << 30) if request.wishes["top_k"] >= 1 else -1
        if "seed" in request.wishes:
            seed = int(request.wishes["seed"])
    # Engines count one token more for themselves at the very end of the context.
    bounds = [row_limit, max(1, room - 1), request.max_tokens, pinned.max_new_tokens]
    out["max_new_tokens"] = min(b for b in bounds if b is not None)
    if request.stop:
        out["stop"] = request.stop
    if seed is not None:
        out["seed"] = seed
    return out


def seed_of(seed: int, session_id: str, attempt: int, index: int) -> int:
    """A seed of its own for each call: samples of one task, and siblings, must differ under one pinned seed."""
    raw = hashlib.blake2b(f"{seed}|{session_id}|{attempt}|{index}".encode(), digest_size=4).digest()
    return int.from_bytes(raw, "big") & 0x7FFFFFFF
