"""`regex`: a pattern of the task's author, applied to each line of the output."""

from __future__ import annotations

import math
import re

from evaluators.reports.findings import Findings, ReportError, Status, collect, text_of

# Longer lines are cut: a careless pattern may take time quadratic in what the agent's code prints.
_MAX_LINE = 4096
_WORDS: dict[str, Status] = {
    **dict.fromkeys(("pass", "passed", "ok", "success", "✓", "✔", "."), "passed"),
    **dict.fromkeys(("skip", "skipped", "ignored", "pending"), "skipped"),
    **dict.fromkeys(("fail", "failed", "failure", "not ok", "✗", "✘", "×", "f"), "failed"),
    **dict.fromkeys(("error", "errored", "e"), "error"),
}


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Raises ValueError unless it has the groups `id` and `status`, or the group `reward`."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise ValueError(f"not a regular expression: {e}") from e
    groups = set(compiled.groupindex)
    if groups not in ({"id", "status"}, {"reward"}):
        raise ValueError(f"named groups are {sorted(groups) or 'none'}; allowed: id and status, or reward")
    return compiled


def parse(data: bytes, pattern: re.Pattern[str]) -> Findings:
    """Tests from `id` and `status` (a usual word for passed, failed, error, skipped), or the last `reward`.

    Raises ReportError when nothing matches, a status is no such word, or a reward is not a finite number.
    """
    matches = [m for line in text_of(data).splitlines() if (m := pattern.search(line[:_MAX_LINE]))]
    if not matches:
        raise ReportError("no line matches the pattern")
    if "reward" in pattern.groupindex:
        return Findings(reward=_number(matches[-1]["reward"]))
    return Findings(tests=collect((_text(m["id"]), _status(m["status"])) for m in matches))


def _text(value: str | None) -> str:
    return (value or "").strip()


def _status(value: str | None) -> Status:
    word = _text(value).lower()
    if word not in _WORDS:
        raise ReportError(f"'{word[:80]}' is no known status word")
    return _WORDS[word]


def _number(value: str | None) -> float:
    try:
        number = float(_text(value))
    except ValueError:
        raise ReportError(f"reward '{_text(value)[:80]}' is not a number") from None
    if not math.isfinite(number):
        raise ReportError(f"reward {number} is not finite")
    return number
