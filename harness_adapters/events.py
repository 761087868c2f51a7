"""The events that a CLI wrote, read from the tail of its output.

The agent's own commands may write there, too: what is read decides nothing but how the run ended and its notes, and all of
it is bounded and such that a result can hold it. Else the agent could fail its attempt, and be given another.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from harness_adapters.common import by_exit_code, ended_by_itself, last_lines, writable
from polar.launch import Outcome

TAIL = 1 << 20  # bytes: of more than that an adapter is given the end
MAX_LINE = TAIL
MAX_NOTE = 500  # characters
MAX_COUNT = (1 << 53) - 1  # what every reader of JSON can hold
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


def cut_off(output: str) -> bool:
    """Whether `output` may be the end of more: then its first line is a part of one, and what it doesn't have is unknown."""
    return len(output.encode("utf-8", "replace")) >= TAIL


def of_type(found: list[dict[str, Any]], *types: str) -> list[dict[str, Any]]:
    return [e for e in found if e.get("type") in types]


def last_at(found: list[dict[str, Any]], kind: str) -> int:
    """The place of the last event of that type, -1 if there is none."""
    return max((i for i, e in enumerate(found) if e.get("type") == kind), default=-1)


def ended(exit_code: int | None, output: str, *, answered: bool, error: str, notes: dict[str, Any]) -> Outcome:
    """How a run ended. `answered`: the CLI says that it came to its end; an exit code 0 without that is an error, since some
    CLIs exit so when they did nothing. `error` is the CLI's own last word on a failure."""
    error = " ".join(error.split())
    if error:
        notes["error"] = error
    notes = known(notes, output)
    if exit_code == 0 and answered and not error:
        return Outcome(termination="finished", notes=notes)
    if exit_code == 0:
        where = " in the last MiB of its output" if cut_off(output) else ""
        outcome = Outcome(termination="agent_error", message=error or f"exit code 0 without a final answer{where}")
    else:
        outcome = by_exit_code(exit_code, output)
        if error and exit_code is not None:
            outcome.message = f"exit code {exit_code}: {error}"
    said = f"{error} {last_lines(_plain(output), 1000)}".lower()
    if ended_by_itself(exit_code) and any(w in said for w in _OVERFLOW):
        outcome.termination = "context_overflow"
    outcome.notes = notes
    return outcome


def known(notes: dict[str, Any], output: str) -> dict[str, Any]:
    """The notes that say something. `partial`: they tell of the end of a long output, where nothing counted is nothing known."""
    notes = {k: v for k, v in notes.items() if v not in (None, "", [], {})}
    if cut_off(output):
        notes = {k: v for k, v in notes.items() if v != 0} | {"partial": True}
    return notes


def _plain(output: str) -> str:
    """What the CLI says in plain words. Not its events, whole or cut: what a tool printed is in them."""
    lines = output.split("\n")[cut_off(output) :]
    return "\n".join(line for line in lines if not line.startswith("{"))


def text_of(value: Any, *path: str) -> str:
    """The string at `path` of nested objects, "" if there is none. Bounded, and such that a result can hold it."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return writable(value[:MAX_NOTE]) if isinstance(value, str) else ""


def numbers(value: Any, names: dict[str, str]) -> dict[str, int]:
    """The whole numbers among `value`'s members, renamed."""
    if not isinstance(value, dict):
        return {}
    return {new: value[old] for old, new in names.items() if whole(value.get(old))}


def whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def total(values: Iterable[Any], names: dict[str, str]) -> dict[str, int]:
    """The sums of what `numbers` finds in each."""
    sums: dict[str, int] = {}
    for value in values:
        for k, n in numbers(value, names).items():
            sums[k] = min(sums.get(k, 0) + n, MAX_COUNT)
    return dict(sorted(sums.items()))


def count(found: list[dict[str, Any]], match: Callable[[dict[str, Any]], bool]) -> int:
    return sum(1 for e in found if match(e))
