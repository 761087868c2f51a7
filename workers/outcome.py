"""What an adapter says of a run's end, such that a result can hold it.

It is read from what the agent wrote: neither an adapter that fails over it nor notes that can't be stored may be a failure
of the machinery, or the agent could choose to be given another attempt.
"""

from __future__ import annotations

import logging
from typing import get_args

from harness_adapters.common import by_exit_code, writable
from polar.codec import pack
from polar.launch import HarnessAdapter, Outcome
from polar.result import Termination
from polar.sandbox import ExecResult

log = logging.getLogger("polar.run")

NOTES_LIMIT = 65536  # bytes, packed
MESSAGE_LIMIT = 2000  # characters


def read(adapter: HarnessAdapter, result: ExecResult) -> Outcome:
    output = result.output.decode("utf-8", "replace")
    try:
        said = adapter.outcome(result.exit_code, output)
        if said.termination not in get_args(Termination):
            raise ValueError(f"termination '{said.termination}'")
        said.message = writable(said.message[:MESSAGE_LIMIT])
    except Exception as e:
        log.exception("adapter failed", extra={"harness": adapter.name})
        said = by_exit_code(result.exit_code, output)
        said.notes = {"adapter": f"failed on the agent's output: {type(e).__name__}"}
    try:
        size = len(pack(said.notes))
        why = f"{size} bytes, allowed are {NOTES_LIMIT}" if size > NOTES_LIMIT else ""
    except Exception as e:
        why = f"can't be stored: {type(e).__name__}"
    if why:
        said.notes = {"adapter": f"notes left out: {why}"}
    return said
