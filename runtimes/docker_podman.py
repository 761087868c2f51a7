"""Podman's system call filter, narrowed: its own lets an agent make user namespaces, and use the kernel's keyrings.

Podman takes the path of a filter on its own machine, not the filter. Where this process is elsewhere, or can't read Podman's
own, that one stays.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

REFUSED = frozenset({"unshare", "setns", "keyctl", "add_key", "request_key", "clone", "clone3"})
_NEW_NAMESPACES = 0x7E020000
_ENOSYS = 38
# A clone3's flags can't be looked at; the C library takes `clone` where it "doesn't exist".
_CLONES: list[dict[str, Any]] = [
    {
        "names": ["clone"],
        "action": "SCMP_ACT_ALLOW",
        "args": [{"index": 0, "value": _NEW_NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}],
    },
    {"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": _ENOSYS},
]


def narrowed(profile: dict[str, Any]) -> dict[str, Any]:
    """What it refused is refused still, and more."""
    rules = [{**r, "names": [n for n in r["names"] if n not in REFUSED]} for r in profile["syscalls"]]
    return {**profile, "syscalls": [r for r in rules if r["names"]] + _CLONES}


def filter_file(own: str, folder: Path) -> str | None:
    """The path of the narrowed filter, written below `folder`, which Podman's user must be able to get into."""
    try:
        text = json.dumps(narrowed(json.loads(Path(own).read_bytes())))
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "podman-seccomp.json"
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as f:
            f.write(text)
        os.chmod(f.name, 0o644)
        os.replace(f.name, target)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(target)
