"""`reward_file`: a file that holds a number, or JSON with the key `reward`."""

from __future__ import annotations

import json
import math

from evaluators.reports.findings import Findings, ReportError

_MAX_BYTES = 1024 * 1024


def parse(data: bytes) -> Findings:
    """Raises ReportError unless it is one finite number or {"reward": <finite number>, ...}."""
    if len(data) > _MAX_BYTES:
        raise ReportError(f"reward file of {len(data)} bytes (at most {_MAX_BYTES})")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise ReportError("reward file is neither a number nor JSON") from None
    if isinstance(value, dict):
        value = value.get("reward")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ReportError(f"reward is {type(value).__name__}, a number is needed")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise ReportError("reward is not finite")
    return Findings(reward=reward)
