"""What harnesses make of an assistant turn when they echo it, without meaning to say anything else.

The law: a prompt is what the harness's history says. The exception: where a turn is known to be a certain completion (its
history is the completion's, and its calls have the completion's ids), and the difference is one that the harness's software
makes on its own, then the policy's own tokens are what was really said. Each such difference is listed here, with why it
loses nothing; any other difference is an edit, and edits are rendered.
"""

from __future__ import annotations

import json
from typing import Any

from proxy import history
from proxy.neutral import Message

_UNPARSED = "__unparsedToolInput"


def verbatim(ours: Message, theirs: Message) -> bool:
    """Whether `theirs` is what was said, to the letter (ids and a missing reasoning aside): a quick yes to of()."""
    if theirs["content"] != ours["content"]:
        return False
    reasoning = theirs.get("reasoning_content")
    if reasoning and reasoning != ours.get("reasoning_content"):
        return False
    mine, yours = ours.get("tool_calls") or (), theirs.get("tool_calls") or ()
    return len(mine) == len(yours) and all(
        m["function"]["name"] == y["function"]["name"] and m["function"]["arguments"] == y["function"]["arguments"]
        for m, y in zip(mine, yours, strict=True)
    )


def of(ours: Message, theirs: Message) -> bool:
    """Whether `theirs` is only an echo of the response `ours`, given that their histories are equal."""
    if not _same_text(ours, theirs):
        return False
    mine, yours = ours.get("tool_calls") or [], theirs.get("tool_calls") or []
    if len(mine) != len(yours) or history.call_ids(ours) != history.call_ids(theirs):
        return False
    return all(_same_call(m["function"], y["function"]) for m, y in zip(mine, yours, strict=True))


def _same_text(ours: Message, theirs: Message) -> bool:
    said = theirs["content"].strip()
    if said == ours["content"].strip():
        return history.same_reasoning(history.reasoning(ours), history.reasoning(theirs))
    # Thinking turned into text (pi, where a block has no signature): every word is still there, in the same order.
    if theirs.get("reasoning_content") or not ours.get("reasoning_content"):
        return False
    return said.split() == f"{ours['reasoning_content']} {ours['content']}".split()


def _same_call(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    mine, yours = history.normal_arguments(ours["arguments"]), history.normal_arguments(theirs["arguments"])
    sent = _object(theirs["arguments"]) or {}
    if theirs["name"] != ours["name"]:
        # opencode renames a call that it can't run to its tool `invalid`, and says there which tool was meant. The name
        # is kept in the arguments, the error comes again as the result. Another tool's name would be an edit.
        return theirs["name"] == "invalid" and set(sent) == {"tool", "error"} and sent["tool"] == ours["name"]
    if mine == yours:
        return True
    # Claude Code fills in what a call of its tools left out (Edit: `replace_all: false`): all that was sampled is there.
    own = _object(ours["arguments"])
    if own is not None and own.keys() < sent.keys() and all(sent[k] is False for k in sent.keys() - own.keys()):
        return history.normal_arguments(json.dumps({k: sent[k] for k in own})) == mine
    # Claude Code wraps arguments that it couldn't parse: the raw text is inside.
    if set(sent) == {_UNPARSED} and isinstance(sent[_UNPARSED], dict):
        raw = sent[_UNPARSED].get("raw")
        return isinstance(raw, str) and history.normal_arguments(raw) == mine
    # pi puts `{}` for arguments that it couldn't parse, which only such can become. Emptied valid ones are an edit: some
    # harnesses clear old arguments on purpose, to save context, and the policy must not see them then.
    return not sent and theirs["arguments"].strip() == "{}" and own is None and not history.dense(ours["arguments"])


def _object(text: str) -> dict[str, Any] | None:
    """Arguments as an object; None if they aren't one, or dense."""
    if history.dense(text):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
