"""What every command shares: settings, clients, JSON output, exit codes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from cli.terminal import Terminal, json_safe, visible
from polar.codec import to_json
from polar.config import Settings, load
from polar.errors import InvalidConfig
from polar.objects import ObjectStore, open_objects
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from polar.task import TaskRequest

# Exit codes: 0 done; 1 something ended badly (a session in error, a stack that failed); 2 wrong input; 3 a service that
# is needed can't be reached; 4 no such thing; 130 interrupted.
OK, BAD, USAGE, UNAVAILABLE, MISSING, INTERRUPTED = 0, 1, 2, 3, 4, 130
EXIT_BY_CODE = {
    "invalid_task": USAGE, "invalid_config": USAGE, "unsupported_spec": USAGE, "conflict": USAGE, "not_found": MISSING,
    "store_unavailable": UNAVAILABLE, "engine_unavailable": UNAVAILABLE, "unauthorized": UNAVAILABLE,
}  # fmt: skip

err = Terminal(stderr=True)
out = Terminal()


def settings(config: str | None, **overrides: Any) -> Settings:
    """Settings as the library loads them; without any, those of a stack that runs in this folder (`polar up`)."""
    if not config and "POLAR_CONFIG" not in os.environ and not Path("polar.toml").is_file():
        running = Path(os.environ.get("POLAR_DATA_DIR", ".polar")) / "polar.toml"
        if running.is_file():
            config = str(running)
    return load(config, **overrides)


def deployment(config: str | None) -> tuple[Settings, SessionStore, ObjectStore]:
    """The clients of a running deployment. InvalidConfig if none is named."""
    s = settings(config)
    if not s.broker:
        raise InvalidConfig("no deployment: start one with 'polar up', or set POLAR_BROKER or --config")
    return s, SessionStore(connect(s.store_url), Keys(s.namespace)), open_objects(s.objects_url)


def bound(field: str) -> float:
    """The most that a number of a task may be."""
    info = msgspec.inspect.type_info(TaskRequest)
    return next(f.type.le for f in info.fields if f.name == field)  # type: ignore[attr-defined]


def print_json(obj: Any) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json_safe(to_json(obj).decode()) + "\n")
    sys.stdout.flush()


def complain(message: str) -> None:
    """What went wrong, on stderr."""
    err.print(Text.assemble(("polar:", "red"), " ", visible(message)), soft_wrap=True)
