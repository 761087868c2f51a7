"""A scripted policy: what it "samples" is a pure function of the prompt, so retries and restarts change nothing.

An instruction carries `[[run:KEY]]`, a subagent's task `[[KEY/NAME]]`. The policy writes `[[KEY:N]]` into its N-th turn and so
reads from any prompt, also one that was summarised, how far it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

RUN = re.compile(r"\[\[run:([a-z0-9-]+)\]\]")
TASK = re.compile(r"\[\[([a-z0-9-]+)/([a-z]+)\]\]")
# What harnesses ask for when their window is full.
COMPACTION = re.compile(
    r"detailed summary of the conversation|summarizes a conversation|<state_snapshot> XML|CONTEXT CHECKPOINT COMPACTION"
)


class Call(NamedTuple):
    tool: str
    arguments: dict


@dataclass(frozen=True)
class Turn:
    """One answer. `hold`: it stops in the middle and goes on only when it is aborted; `outage`: the engine goes away in the
    middle of it, once, for so many seconds."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    hold: bool = False
    outage: float = 0.0


@dataclass
class Script:
    """`turns` of the main conversation and, by name, of subagents; the last one is said again if more is asked."""

    turns: list[Turn]
    tasks: dict[str, list[Turn]] = field(default_factory=dict)


class Decision(NamedTuple):
    """`text` as it is sampled; `kind` is main, task, compaction or other; `key` "" for a conversation of nobody's script."""

    text: str
    key: str
    kind: str
    turn: Turn | None = None
    number: int = 0


class Policy:
    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}

    def decide(self, prompt: str) -> Decision:
        """What to say to a prompt that ends before the answer."""
        if found := RUN.search(prompt):
            key, task = found[1], ""
        elif found := TASK.search(prompt):
            key, task = found[1], found[2]
        else:
            return Decision("Fine.", "", "other")
        script = self.scripts.get(key)
        if script is None:
            return Decision("I know no such run.", key, "other")
        mark = f"{key}/{task}" if task else key
        done = max((int(n) for n in re.findall(rf"\[\[{re.escape(mark)}:(\d+)\]\]", prompt)), default=0)
        if _asks_for_summary(prompt):
            text = f"What was asked: [[run:{key}]]\nSo far: [[{mark}:{done}]] is done, all as planned. Go on with what is next."
            tag = "state_snapshot" if "<state_snapshot>" in prompt else "summary"  # else it is asked for once more
            return Decision(f"<{tag}>\n{text}\n</{tag}>", key, "compaction", None, done)
        turns = script.tasks[task] if task else script.turns
        number = min(done + 1, len(turns))
        turn = turns[number - 1]
        return Decision(say(turn, f"[[{mark}:{number}]]"), key, "task" if task else "main", turn, number)


def say(turn: Turn, mark: str) -> str:
    """A turn in the form of the served model's template."""
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    parts = [f"{thought}{turn.text} {mark}".strip()]
    for call in turn.calls:
        body = json.dumps({"name": call.tool, "arguments": call.arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _asks_for_summary(prompt: str) -> bool:
    """Whether the last message, or the system message of a conversation without tools, asks for one."""
    last = prompt.rpartition("<|im_start|>user\n")[2]
    if last.startswith("<tool_response>"):
        return False
    if "summarization a" in prompt[:2000]:  # agent, or assistant
        return True
    if "So far: [[" in last or not COMPACTION.search(last[-20000:]):  # a summary is no question for one
        return False
    # The first instruction of a run is no such question, whatever the harness wraps it in.
    return "<|im_start|>assistant\n" in prompt.rpartition("<|im_start|>user\n")[0] or "# Tools\n" not in prompt


Decide = Callable[[str], Decision]
