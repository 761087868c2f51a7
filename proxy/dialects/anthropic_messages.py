"""`system` and `messages` of a Messages request as neutral messages.

Consecutive user or assistant messages are one turn, as Anthropic has it. A user turn becomes one tool message per
tool_result, then one user message with everything else. System messages stay where they are.
"""

from __future__ import annotations

from typing import Any

from proxy.dialects import fields
from proxy.dialects.anthropic_blocks import Reader, arguments, blocks, text
from proxy.dialects.anthropic_signature import unseal
from proxy.failures import bad
from proxy.neutral import Message

# Claude Code's first system block: a version, an entry point and a hash of the call. Nothing for the model.
_BILLING = "x-anthropic-billing-header:"


def system(value: Any, reader: Reader) -> list[Message]:
    parts = [_without_billing(t) for t in reader.texts(value, "system")]
    joined = "\n".join(p for p in parts if p)
    return [{"role": "system", "content": joined}] if joined else []


def messages(raw: list[Any], reader: Reader) -> list[Message]:
    out: list[Message] = []
    names: dict[str, str] = {}  # of tools by the ids of their calls
    i = 0
    while i < len(raw):
        role = _role(raw[i], i)
        end = i + 1
        while role != "system" and end < len(raw) and _role(raw[end], end) == role:
            end += 1
        turn = [(m.get("content"), f"messages[{i + j}].content") for j, m in enumerate(raw[i:end])]
        i = end
        if role == "user":
            out += _user(turn, names, reader)
        elif role == "assistant":
            out.append(_assistant(turn, names, reader))
        else:
            (value, where) = turn[0]
            content = "\n".join(t for t in map(_without_billing, reader.texts(value, where)) if t)
            if content:
                out.append({"role": "system", "content": content})
    return out


def _role(m: Any, i: int) -> str:
    role = fields.obj(m, f"messages[{i}]").get("role")
    if role not in ("user", "assistant", "system"):
        raise bad(f"messages[{i}].role is {role!r:.40}, allowed: user, assistant, system", f"messages[{i}].role")
    return role


def _user(turn: list[tuple[Any, str]], names: dict[str, str], reader: Reader) -> list[Message]:
    results: list[Message] = []
    texts: list[str] = []
    for value, where in turn:
        for b, at in blocks(value, where):
            if b.get("type") == "tool_result":
                results.append(_result(b, at, names, reader))
            else:
                texts.append(reader.block(b, at))
    if results and not any(texts):
        return results
    return [*results, {"role": "user", "content": "\n".join(t for t in texts if t)}]


def _result(b: dict[str, Any], where: str, names: dict[str, str], reader: Reader) -> Message:
    call = text(b, "tool_use_id", where)
    content = "\n".join(reader.texts(b.get("content"), f"{where}.content"))
    failed = b.get("is_error")
    if failed not in (None, True, False):
        raise bad(f"'{where}.is_error' must be true or false", f"{where}.is_error")
    if failed:
        content = f"[tool error]\n{content}" if content else "[tool error]"
    out: Message = {"role": "tool", "tool_call_id": call, "content": content}
    if call in names:
        out["name"] = names[call]  # some templates show it
    return out


def _assistant(turn: list[tuple[Any, str]], names: dict[str, str], reader: Reader) -> Message:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    refs: list[str] = []
    for value, where in turn:
        for b, at in blocks(value, where):
            kind = b.get("type")
            if kind == "tool_use":
                name, ident = text(b, "name", at), text(b, "id", at)
                names[ident] = name
                function = {"name": name, "arguments": arguments(b.get("input"), f"{at}.input")}
                calls.append({"id": ident, "type": "function", "function": function})
            elif kind == "thinking":
                reasoning.append(text(b, "thinking", at, ""))
                refs += _ref(b.get("signature"), refs)
            elif kind == "redacted_thinking":
                refs += _ref(b.get("data"), refs)
            else:
                texts.append(reader.block(b, at))
    out: Message = {"role": "assistant", "content": "".join(texts)}
    if any(reasoning):
        out["reasoning_content"] = "".join(reasoning)
    if calls:
        out["tool_calls"] = calls
    if refs:
        out["refs"] = refs
    return out


def _ref(signature: Any, known: list[str]) -> list[str]:
    ref = unseal(signature)
    return [ref] if ref is not None and ref not in known else []


def _without_billing(value: str) -> str:
    if not value.startswith(_BILLING):
        return value
    return value.partition("\n")[2].lstrip("\n")
