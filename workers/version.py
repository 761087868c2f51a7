"""Is the agent's program in the sandbox, and which version of it? Asked before anything in the sandbox knows a way to the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from harness_adapters.versions import versions
from polar.errors import InfraError
from polar.launch import LaunchPlan
from polar.sandbox import Sandbox

SECONDS = 30.0  # a CLI that takes longer is slow, not missing
OUTPUT_LIMIT = 8192  # bytes
MISSING = (126, 127)  # exit codes: the shell's words for a program that can't be run, or isn't there
PAGE = "docs/harnesses.md ('Getting the CLIs into a sandbox')"
_VERSION = re.compile(r"\d+\.\d+(?:[.+-]?\w+)*")


def ask(
    sandbox: Sandbox, harness: str, plan: LaunchPlan, env: dict[str, str], seconds: float, cancelled: Callable[[], bool]
) -> dict[str, Any]:
    """Notes for the result: `version`, and `version_note` if that is another than the tested one or can't be told. `env` must
    not say how to reach the model. Raises InfraError `harness_missing`, which no retry helps, without the program."""
    if plan.version_argv is None:
        return {}
    bound = min(SECONDS, seconds)
    result = sandbox.exec(
        plan.version_argv, env=env, cwd=plan.cwd, timeout=bound, output_limit=OUTPUT_LIMIT, cancelled=cancelled
    )
    said = result.output.decode("utf-8", "replace")
    if result.exit_code in MISSING:
        tail = " ".join(said.split())[-600:] or f"'{plan.version_argv[0]}' is not there"
        raise InfraError(
            f"the program of '{harness}' can't be run in the sandbox: {tail}; {PAGE} says how it gets there",
            code="harness_missing",
            stage="run",
            retryable=False,
        )
    if result.cancelled:
        return {}
    if result.timed_out:
        return {"version_note": f"no answer within {bound:.0f} s"}
    if result.exit_code != 0:
        return {"version_note": f"exit code {result.exit_code}: {' '.join(said.split())[-200:]}"}
    return judged(said, harness)


def judged(said: str, harness: str) -> dict[str, Any]:
    """Notes on what a program said of its version. A CLI may warn of other things around it."""
    pinned = versions().harnesses.get(harness)
    lines = [found for line in said.splitlines() if (found := _VERSION.findall(line))]
    if not lines:
        return {"version_note": f"said no version: {' '.join(said.split())[:200]}"}
    if pinned is None:
        return {"version": lines[-1][0][:100]}
    if any(pinned.version in found for found in lines):
        return {"version": pinned.version}
    return {"version": lines[-1][0][:100], "version_note": f"tested is {pinned.version}"}
