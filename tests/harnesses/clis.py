"""The CLIs under test: how a policy calls their tools, and what each is able to do."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tests.harnesses.policy import Call

WORK = "/work"


@dataclass(frozen=True)
class Cli:
    """`edit(path, old, new)` replaces text in a file below the working directory; `read` is called before it, where a CLI
    insists on it. `subagent(task)` gives the calls that start one and wait for it, `background(task)` those that don't wait.
    `ends_by` says how a run is finished, if not by an answer without calls. `denies`: arguments that forbid `touch`. `mends`:
    it compacts after the model's 400, and exits with 1. `retells`: its last event repeats all of its run."""

    harness: str
    dialect: str
    shell: Callable[[str], Call]
    edit: Callable[[str, str, str], Call]
    read: Callable[[str], Call] | None = None
    subagent: Callable[[str], list[Call]] | None = None
    background: Callable[[str], list[Call]] | None = None
    ends_by: Call | None = None
    denies: tuple[str, ...] = ()
    mends: bool = False
    retells: bool = False
    compacts: bool = True
    window: int = 0  # toy tokens of the compaction run: a few turns more than its first prompt
    settings: dict[str, Any] = field(default_factory=dict)
    budget: float = 25.0  # seconds in which it surely comes to its second turn
    only: tuple[str, ...] = ()  # scenarios, if not all that it is able to do

    def runs(self, scenario: str, able: bool) -> bool:
        return able and (not self.only or scenario in self.only)

    @property
    def id(self) -> str:
        return f"{self.harness}-{self.dialect}"


def _codex_patch(path: str, old: str, new: str) -> Call:
    patch = f"*** Begin Patch\n*** Update File: {path}\n@@\n-{old}\n+{new}\n*** End Patch"
    return Call("exec_command", {"cmd": f"apply_patch <<'EOF'\n{patch}\nEOF"})


def _sed(path: str, old: str, new: str) -> str:
    return f"sed -i {shlex.quote(f's/{old}/{new}/')} {shlex.quote(path)}"


PI = Cli(
    harness="pi",
    dialect="openai_chat",
    shell=lambda c: Call("bash", {"command": c}),
    edit=lambda p, a, b: Call("edit", {"path": p, "edits": [{"oldText": a, "newText": b}]}),
    retells=True,
    window=40000,
)
QWEN = Cli(
    harness="qwen_code",
    dialect="openai_chat",
    # It stops listening when a command ends: on a busy machine what it printed just before is lost.
    shell=lambda c: Call("run_shell_command", {"command": f"trap 'sleep 0.5' EXIT; {c}", "is_background": False}),
    edit=lambda p, a, b: Call("edit", {"file_path": f"{WORK}/{p}", "old_string": a, "new_string": b}),
    read=lambda p: Call("read_file", {"file_path": f"{WORK}/{p}"}),
    subagent=lambda task: [
        Call("agent", {"description": "a part", "prompt": task, "subagent_type": "general-purpose"})
    ],
    denies=("--exclude-tools", "run_shell_command(touch)"),
    window=100000,
)
OPENCODE = Cli(
    harness="opencode",
    dialect="openai_chat",
    shell=lambda c: Call("bash", {"command": c, "description": "run a command"}),
    edit=lambda p, a, b: Call("edit", {"filePath": f"{WORK}/{p}", "oldString": a, "newString": b}),
    read=lambda p: Call("read", {"filePath": f"{WORK}/{p}"}),
    subagent=lambda task: [Call("task", {"description": "a part", "prompt": task, "subagent_type": "general"})],
    mends=True,
    window=40000,
    budget=40.0,
)
MINI = Cli(
    harness="mini_swe_agent",
    dialect="openai_chat",
    shell=lambda c: Call("bash", {"command": c}),
    edit=lambda p, a, b: Call("bash", {"command": _sed(p, a, b)}),
    ends_by=Call("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}),
    compacts=False,
    budget=60.0,
)
_AGENT = {"description": "a part", "subagent_type": "general-purpose"}
CLAUDE = Cli(
    harness="claude_code",
    dialect="anthropic",
    shell=lambda c: Call("Bash", {"command": c, "description": "run a command"}),
    edit=lambda p, a, b: Call("Edit", {"file_path": f"{WORK}/{p}", "old_string": a, "new_string": b}),
    read=lambda p: Call("Read", {"file_path": f"{WORK}/{p}"}),
    subagent=lambda task: [Call("Agent", {**_AGENT, "prompt": task, "run_in_background": False})],
    background=lambda task: [Call("Agent", {**_AGENT, "prompt": task})],  # its default
    denies=("--disallowedTools", "Bash(touch:*)"),
    window=100000,
)
CODEX = Cli(
    harness="codex",
    dialect="openai_responses",
    shell=lambda c: Call("exec_command", {"cmd": c, "yield_time_ms": 30000}),
    edit=_codex_patch,
    subagent=lambda task: [Call("multi_agent_v1__spawn_agent", {"message": task})],
    window=50000,
)
GEMINI = Cli(
    harness="gemini_cli",
    dialect="google",
    shell=lambda c: Call("run_shell_command", {"command": c}),
    edit=lambda p, a, b: Call(
        "replace", {"file_path": f"{WORK}/{p}", "old_string": a, "new_string": b, "instruction": "change the word"}
    ),
    subagent=lambda task: [Call("invoke_agent", {"agent_name": "generalist", "prompt": task})],
    compacts=False,
)
ALL = [PI, QWEN, OPENCODE, MINI, CLAUDE, CODEX, GEMINI]
# The other dialects that some of them speak: one scenario each.
OTHERS = [
    replace(MINI, dialect="openai_responses", settings={"model_class": "litellm_response"}, only=("multi_turn",)),
    *(
        replace(cli, dialect=dialect, settings={"dialect": dialect}, only=("multi_turn",))
        for cli, dialects in (
            (PI, ("openai_responses", "anthropic", "google")),
            (QWEN, ("openai_responses", "anthropic", "google")),
            (OPENCODE, ("openai_responses", "anthropic")),
        )
        for dialect in dialects
    ),
]
