"""`polar up`: a stack that stays."""

from __future__ import annotations

import signal
import threading

from cli.common import BAD, OK, err
from cli.stack import EMBEDDED_MODEL, Stack
from polar.config import Settings


def up(settings: Settings, *, node: str, slots: int, model: str) -> int:
    stack = Stack(settings, node=node, slots=slots, model=model or EMBEDDED_MODEL)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        stack.start(lambda text: err.print(f"[dim]· {text}[/]"))
        for part, what in stack.used.items():
            err.print(f"  {part:8} {what}", soft_wrap=True)
        err.print("ready: 'polar run task.yaml' in another terminal; Ctrl-C stops everything")
        while not ended.wait(0.5):
            if stack.supervisor.failed:
                err.print(f"[red]polar:[/] {stack.supervisor.failed}", soft_wrap=True)
                return BAD
        return OK
    except KeyboardInterrupt:
        err.print("stopping")
        return OK
    finally:
        stack.stop()
