"""The events that a CLI wrote, read from the tail of its output.

The agent's own commands may write there, too, so what is read decides nothing but how the run ended and its notes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from harness_adapters.common import by_exit_code, last_lines
from polar.launch import Outcome

MAX_LINE = 1 << 20
MAX_NOTE = 500
_OVERFLOW = (
    "prompt is too long",
    "context_length_exceeded",
    "maximum context length",
    "context window",
    "contextwindowexceeded",
    "exceeds the available context",
)


def events(output: str) -> list[dict[str, Any]]:
    """Every line that is a JSON object. The first may be cut off; it is left out then."""
    found = []
    for line in output.split("\n"):
        if len(line) > MAX_LINE or not line.startswith("{"):
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def ended(
    exit_code: int | None, output: str, *, answered: bool, error: str, notes: dict[str, Any], partial: bool = False
) -> Outcome:
    """How a run ended. `answered`: the CLI says that it came to its end; an exit code 0 without that is an error, since some
    CLIs exit so when they did nothing. `error` is the CLI's own last word on a failure."""
    error = " ".join(error.split())[:MAX_NOTE]
    if error:
        notes["error"] = error
    if partial:
        notes["partial"] = True  # the counts are those of the end of the output
    notes = {k: v for k, v in notes.items() if v not in (None, "", [], {})}
    if exit_code == 0 and answered and not error:
        return Outcome(termination="finished", notes=notes)
    if exit_code == 0:
        outcome = Outcome(termination="agent_error", message=error or "exit code 0 without a final answer")
    else:
        outcome = by_exit_code(exit_code, output)
        if error and exit_code is not None:
            outcome.message = f"exit code {exit_code}: {error}"
    # Not the events: what a tool printed is not what the CLI says.
    plain = "\n".join(line for line in output[-20_000:].split("\n") if not line.startswith("{"))
    said = f"{error} {last_lines(plain, 1000)}".lower()
    if exit_code is not None and any(w in said for w in _OVERFLOW):
        outcome.termination = "context_overflow"
    outcome.notes = notes
    return outcome


def text_of(value: Any, *path: str) -> str:
    """The string at `path` of nested objects, "" if there is none."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


def numbers(value: Any, names: dict[str, str]) -> dict[str, int]:
    """The whole numbers among `value`'s members, renamed."""
    if not isinstance(value, dict):
        return {}
    found = {new: value.get(old) for old, new in names.items()}
    return {k: v for k, v in found.items() if isinstance(v, int) and not isinstance(v, bool) and 0 <= v < 1 << 53}


def count(found: list[dict[str, Any]], match: Callable[[dict[str, Any]], bool]) -> int:
    return sum(1 for e in found if match(e))
