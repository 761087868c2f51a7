"""`polar up`: a stack that stays."""

from __future__ import annotations

import time

from cli.common import OK, err
from cli.stack import EMBEDDED_MODEL, Stack, interruptible
from cli.supervisor import StackError
from polar.config import Settings


def up(settings: Settings, *, node: str, slots: int, model: str) -> int:
    stack = Stack(settings, node=node, slots=slots, model=model or EMBEDDED_MODEL)
    interruptible()
    try:
        stack.start(lambda text: err.print(f"· {text}", style="dim", soft_wrap=True))
        for part, what in stack.used.items():
            err.print(f"  {part:8} {what}", soft_wrap=True)
        err.print("ready: 'polar run task.yaml' in another terminal; Ctrl-C stops everything")
        while not (failed := stack.supervisor.failed):
            time.sleep(0.5)
        raise StackError(failed)
    except KeyboardInterrupt:
        err.print("stopping")
        return OK
    finally:
        stack.stop()
