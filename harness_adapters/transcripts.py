"""From a trace to what the agent thought it was doing: entries of a CLI's own transcript joined to completions.

Whatever a CLI writes down of an answer has the ids that the proxy gave it: the message's is made of the completion's id, a
tool call's is `call_<completion>_<n>`. So one reading serves all CLIs and their versions: any JSON in the files is searched for
such ids. Text is compared only where there is none. Nothing here trusts a transcript: the agent could have written it.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from msgspec import Struct, field

from harness_adapters.common import writable
from polar.completion import Completion

# Bounds of what is read of one transcript: bytes, entries, JSON values of one entry.
MAX_BYTES = 64 << 20
MAX_ENTRIES = 100_000
MAX_VALUES = 20_000
MAX_ID = 80  # characters
_TOKEN = re.compile(r"[0-9a-z]{16,64}")
_CALL = re.compile(r"call_([0-9a-z]{8,64})_\d+")
_ANSWERS = frozenset({"assistant", "model", "gemini", "function_call", "custom_tool_call", "reasoning", "agent_message",
                      "tool_use", "text", "step-start", "step-finish"})  # fmt: skip
_RESULTS = frozenset({"tool_result", "toolResult", "tool", "function_call_output", "custom_tool_call_output", "user"})
_TEXT_KEYS = frozenset({"text", "content", "thinking", "reasoning", "output", "thought", "message", "parts"})


class Entry(Struct, frozen=True, kw_only=True):
    """One JSON value of a transcript file; `line` counts from 1, or is the place in the file's outermost list."""

    file: str
    line: int
    value: dict[str, Any]


class Joined(Struct, kw_only=True):
    """An entry and the completion that it is about: as its `answer`, or as the `result` of one of its tool calls. Entries of
    neither kind (prompts, settings, events) have no completion. `by`: the id it was found by, or `text`."""

    file: str
    line: int
    completion_id: str = ""
    index: int = -1  # of the completion in its attempt
    kind: Literal["answer", "result", ""] = ""
    by: str = ""
    text: str = ""  # the beginning of what it says


class Join(Struct, kw_only=True):
    """`missing`: completions that no entry speaks of (an answer that never reached the CLI, a side call)."""

    entries: list[Joined] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def of(self, completion_id: str) -> list[Joined]:
        return [e for e in self.entries if e.completion_id == completion_id]


def read(name: str, data: bytes) -> Iterator[Entry]:
    """The entries of a collected artifact: JSON Lines, one JSON document, or a tar of such files. What is no JSON is passed
    over, and no more than the bounds is read."""
    left = MAX_BYTES
    count = 0
    for file, text in _files(name, data):
        text = text[:left]
        left -= len(text)
        for entry in _entries(file, text):
            count += 1
            if count > MAX_ENTRIES:
                return
            yield entry
        if left <= 0:
            return


def join(entries: Iterable[Entry], completions: list[Completion]) -> Join:
    """Each entry with the completion it is about. The order of the entries is kept."""
    known = {c.completion_id: c for c in completions}
    by_short = {_short(c): c for c in known}
    by_text: dict[str, list[str]] = {}
    for c in completions:
        if said := _said(c):
            by_text.setdefault(said, []).append(c.completion_id)
    out, spoken = Join(), set()
    for entry in entries:
        strings = list(_strings(entry.value))
        joined = Joined(file=entry.file, line=entry.line, text=_beginning(entry.value))
        found, by = _by_id(strings, by_short)
        answers = _is_answer(entry.value)
        if not found and answers:
            # The first of equal texts that no entry has spoken of yet.
            same = [i for _, s in strings for i in by_text.get(_squeeze(s), ())]
            found, by = next((i for i in same if i not in spoken), same[0] if same else ""), "text"
        if found:
            joined.completion_id, joined.index, joined.by = found, known[found].index, writable(by)
            # A message's id stands for the answer itself, a call's also beside its result.
            joined.kind = "answer" if answers or not (_CALL.fullmatch(by) or _is_result(entry.value)) else "result"
            spoken.add(found)
        out.entries.append(joined)
    out.missing = [c.completion_id for c in completions if c.completion_id not in spoken]
    return out


def _by_id(strings: list[tuple[str, str]], by_short: dict[str, str]) -> tuple[str, str]:
    for _, s in strings:
        if len(s) > MAX_ID:  # an id stands alone; text that merely mentions one doesn't count
            continue
        for token in _TOKEN.findall(s):
            if token in by_short:
                return by_short[token], s
    return "", ""


def _is_answer(value: dict[str, Any]) -> bool:
    """Whether an entry says of itself that the model said it."""
    return not _is_result(value) and any(w in _ANSWERS for w in _kinds(value))


def _is_result(value: dict[str, Any]) -> bool:
    return any(w in _RESULTS for w in _kinds(value))


def _kinds(value: dict[str, Any]) -> Iterator[str]:
    """What an entry calls itself: `type` and `role`, its own and those of what it wraps."""
    for holder in (value, *(value.get(k) for k in ("message", "payload", "item", "info", "part"))):
        if isinstance(holder, dict):
            yield from (w for w in (holder.get("type"), holder.get("role")) if isinstance(w, str))


def _files(name: str, data: bytes) -> Iterator[tuple[str, str]]:
    try:
        # Plain: a compressed one isn't ours, could be of any size within, and its errors are of many kinds.
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                if member.isreg() and member.size <= MAX_BYTES and (f := tar.extractfile(member)) is not None:
                    yield writable(member.name.removeprefix("./")), f.read().decode("utf-8", "replace")
    except tarfile.TarError:
        yield name, data.decode("utf-8", "replace")


def _entries(file: str, text: str) -> Iterator[Entry]:
    if file.endswith(".jsonl") or "\n{" in text.strip():
        if (whole := _json(text)) is None:
            for line, one in enumerate(text.split("\n"), 1):
                if isinstance(value := _json(one), dict):
                    yield Entry(file=file, line=line, value=value)
            return
    else:
        whole = _json(text)
    if isinstance(whole, dict):
        listed = next((whole[k] for k in ("messages", "history", "turns") if isinstance(whole.get(k), list)), None)
        values = [whole] if listed is None else listed
    else:
        values = whole if isinstance(whole, list) else []
    for line, value in enumerate(values, 1):
        if isinstance(value, dict):
            yield Entry(file=file, line=line, value=value)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _strings(value: Any) -> Iterator[tuple[str, str]]:
    """(key, string) pairs anywhere below a value, in order, at most MAX_VALUES of them."""
    todo: list[tuple[str, Any]] = [("", value)]
    seen = 0
    while todo and seen < MAX_VALUES:
        key, v = todo.pop()
        seen += 1
        if isinstance(v, str):
            yield key, v
        elif isinstance(v, dict):
            todo += [(str(k), x) for k, x in reversed(v.items())]
        elif isinstance(v, list):
            todo += [(key, x) for x in reversed(v)]


def _said(c: Completion) -> str:
    return _squeeze(c.response.get("content") or "")


def _squeeze(text: str) -> str:
    return " ".join(text.split())


def _beginning(value: dict[str, Any]) -> str:
    return next((writable(_squeeze(s)[:200]) for k, s in _strings(value) if k in _TEXT_KEYS and s.strip()), "")


def _short(completion_id: str) -> str:
    """The part that ids made of it carry."""
    return completion_id.partition("-")[2] or completion_id
