"""Loading of the Lua scripts, for the blocking and the asyncio client alike."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any


@cache
def source(name: str) -> str:
    """The text of `lua/<name>.lua`; lines `-- include X` are replaced by `lua/X.lua`."""
    text = (files("polar.store") / "lua" / f"{name}.lua").read_text(encoding="utf-8")
    out = []
    for line in text.splitlines():
        out.append(source(line.split()[2]) if line.startswith("-- include ") else line)
    return "\n".join(out)


def register(client: Any, name: str) -> Any:
    """A callable script bound to a redis client (`redis.Redis` or `redis.asyncio.Redis`): `script(keys=…, args=…)`."""
    return client.register_script(source(name))
