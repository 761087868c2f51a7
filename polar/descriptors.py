"""How many files and connections a process may have open."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 65536


def raise_limit() -> int:
    """Raise the soft limit (usually 1,024) as far as we need and may. Returns what may be open now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
