"""Input items of the Responses dialect to neutral messages: what one answer was told in several items is one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from proxy.dialects import fields
from proxy.dialects.base import Recalled
from proxy.dialects.responses_calls import ITEM_OF, ITEMS, RAW, arguments_of
from proxy.dialects.responses_content import Reader
from proxy.dialects.responses_fields import dumps, items
from proxy.dialects.responses_ids import completion_of, parts_of, summary_of, unseal
from proxy.dialects.responses_tools import Toolbox
from proxy.failures import bad
from proxy.neutral import Message

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REFUSED = {
    "computer_call": "this model can't see a screen",
    "computer_call_output": "this model can't see a screen",
    "mcp_approval_request": "MCP servers are not called from here",
    "mcp_approval_response": "MCP servers are not called from here",
    "program": "programs are not run here",
    "program_output": "programs are not run here",
}
_TEXTS = {"rs": "reasoning_content", "msg": "content"}  # prefix of an item's id -> what of the answer it is
_CALLS = {prefix for _, prefix in ITEM_OF.values()}
SUMMARY = "Summary of the conversation so far, which you wrote yourself:\n\n"


class History:
    """`messages` as they add up, whole after close(); `users` are the user's items as they came; `updates` the settings that
    items changed on the way; `compact`: the client asks for a compaction in place of an answer."""

    def __init__(self, tools: Toolbox, recalled: Recalled):
        self.messages: list[Message] = []
        self.reader = Reader()
        self.users: list[dict[str, Any]] = []
        self.updates: dict[str, Any] = {}
        self.compact = False
        self._tools = tools
        self._open: Message | None = None  # the assistant's turn that the next item may belong to
        self._last: Message | None = None  # the same, with nothing but results of its calls behind it
        self._names: dict[str, str] = {}  # of calls by their ids
        self._recalled = recalled
        self._cited: set[tuple[str, Any]] = set()  # (completion, what of it) that references stood for
        self._answered = False
        self._texts: list[tuple[Message, str, list[str]]] = []  # turn, key, and the pieces of its text
        self._grows: dict[tuple[int, str], list[str]] = {}  # the same pieces, by the turn's identity

    def close(self) -> None:
        """No item is to come."""
        for turn, key, pieces in self._texts:
            turn[key] = "".join(pieces)

    def go_on(self, messages: list[Message]) -> None:
        """After an earlier conversation, which ends with an answer."""
        for m in messages:
            self.messages.append(m)
            self._names.update((c["id"], c["function"]["name"]) for c in m.get("tool_calls") or ())
            if m["role"] == "user" and not m["content"].startswith(SUMMARY):
                self.users.append(m)
        self._answered = bool(messages)

    def say(self, role: str, content: str) -> None:
        self._open = self._last = None
        self.messages.append({"role": role, "content": content})

    def add(self, raw: Any, where: str) -> None:
        """Take in one item. CallError names its field."""
        if self.compact:
            raise bad(f"{where} stands behind the compaction_trigger", where)
        item = fields.obj(raw, where)
        kind = item.get("type")
        if kind is None:
            kind = "message" if "role" in item else "item_reference" if is_reference(item) else ""
        if not isinstance(kind, str):
            raise bad(f"'{where}.type' must be a string, not {kind!r:.40}", f"{where}.type")
        if kind in ITEMS:
            self._call(item, kind, where)
        elif kind in _OUTPUTS:
            self._result(item.get("call_id") or item.get("id"), _OUTPUTS[kind](self, item, where), where)
        elif kind in _HOSTED:
            name, arguments, result = _HOSTED[kind](self, item, where)
            self._hosted(item.get("id"), name, arguments, result, where)
        elif kind in _OTHERS:
            _OTHERS[kind](self, item, where)
        elif kind in _REFUSED:
            raise bad(f"{where} is of type {kind}: {_REFUSED[kind]}", where, "unsupported_item")
        else:
            raise bad(f"{where}.type is {kind!r:.60}, which is no item known here", f"{where}.type")

    # The assistant's turn --------------------------------------------------------------------------------------------

    def _turn(self, refs: list[str | None]) -> tuple[Message, bool]:
        """The assistant message that an item of these completions belongs to, and whether it is known to."""
        known = [r for r in refs if r is not None]
        for turn in (self._open, self._last):
            if turn is None:
                continue
            if same := bool(set(known) & set(turn.get("refs", ()))):
                return turn, same
            if turn is self._open and not (known and turn.get("refs")):
                self._note(turn, known)
                return turn, False
        turn = {"role": "assistant", "content": ""}
        self._note(turn, known)
        self.messages.append(turn)
        self._open = self._last = turn
        self._answered = True
        return turn, False

    def _note(self, turn: Message, known: list[str]) -> None:
        if known:
            turn["refs"] = list(dict.fromkeys([*turn.get("refs", ()), *known]))

    def _append(self, item: dict[str, Any], key: str, more: str, refs: list[str | None]) -> None:
        turn, same = self._turn([completion_of(item.get("id")), *refs])
        if not more:
            return
        pieces = self._grows.get((id(turn), key))
        if pieces is None:
            pieces = self._grows[id(turn), key] = []
            self._texts.append((turn, key, pieces))
        elif not same:
            pieces.append("\n\n")
        pieces.append(more)

    def _call(self, item: dict[str, Any], kind: str, where: str) -> None:
        tool, _ = ITEMS[kind]
        call_id = fields.text_at(item, "call_id", where, "") or fields.text_at(item, "id", where, "")
        if raw := tool == "custom" and call_id.endswith(RAW):
            call_id = call_id.removesuffix(RAW)
        arguments = fields.text_at(item, "input", where) if raw else arguments_of(tool, item, where)
        name = tool if tool not in ("function", "custom") else fields.text_at(item, "name", where)
        namespace = fields.text_at(item, "namespace", where, "") or None
        self._add_call([item.get("id"), call_id], call_id, self._tools.name(tool, name, namespace), arguments)

    def _add_call(self, ids: list[Any], call_id: str, name: str, arguments: str) -> None:
        turn, _ = self._turn([completion_of(i) for i in ids])
        function = {"name": name, "arguments": arguments}
        turn.setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._names[call_id] = name

    def _hosted(self, call_id: Any, name: str, arguments: str, result: str, where: str) -> None:
        """A call that some other server ran, and its result."""
        if not isinstance(call_id, str):
            raise bad(f"'{where}.id' must be a string", f"{where}.id")
        self._add_call([], call_id, name, arguments)
        self._result(call_id, result, where)

    def _result(self, call_id: Any, told: str, where: str) -> None:
        self._open = None
        if call_id is not None and not isinstance(call_id, str):
            raise bad(f"'{where}.call_id' must be a string, not {call_id!r:.40}", f"{where}.call_id")
        call_id = call_id or ""
        if call_id not in self._names and (own := call_id.removesuffix(RAW)) in self._names:
            call_id = own
        message: Message = {"role": "tool", "content": told, "tool_call_id": call_id}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    # Other items -----------------------------------------------------------------------------------------------------

    def _message(self, item: dict[str, Any], where: str) -> None:
        theirs = fields.text_at(item, "role", where)
        if (role := _ROLES.get(theirs)) is None:
            raise bad(f"{where}.role is {theirs!r:.40}, allowed: {', '.join(_ROLES)}", f"{where}.role")
        content = self.reader.text(item.get("content"), f"{where}.content")
        if role == "assistant":
            self._append(item, "content", content, [])
            return
        if role == "user":
            self.users.append(item)
        self.say(role, content)

    def _reasoning(self, item: dict[str, Any], where: str) -> None:
        sealed = unseal("reasoning", item.get("encrypted_content"))
        told = self.reader.text(item.get("content"), f"{where}.content")
        summary = self.reader.text(item.get("summary"), f"{where}.summary", "\n\n")
        told = told or (sealed[1] if sealed else summary)
        self._append(item, "reasoning_content", told, [sealed[0] if sealed else None])

    def _reference(self, item: dict[str, Any], where: str) -> None:
        """An item of an earlier answer, named by its id: as if it had been sent."""
        name = fields.text_at(item, "id", where)
        prefix, completion, n = parts_of(name) or ("", "", 0)
        said = self._recalled.responses.get(completion)
        calls = said.get("tool_calls") or () if said is not None else ()
        if said is not None and (key := _TEXTS.get(prefix)):
            # An answer's text is one, also where calls stand inside it.
            more = said.get(key) or "" if self._first(completion, key) else ""
            self._append(item, key, more, [])
        elif said is not None and prefix == "cmp":
            self._once(completion, prefix, name, where)
            self.say("user", SUMMARY + summary_of(said["content"], said.get("reasoning_content") or ""))
        elif prefix in _CALLS and n < len(calls):
            self._once(completion, n, name, where)
            function = calls[n]["function"]
            self._add_call([name], calls[n]["id"], function["name"], function["arguments"])
        else:
            why = "is no item of an answer in this session: send the item itself"
            raise bad(f"Item with id '{name:.80}' not found: it {why}", f"{where}.id", "item_not_found")

    def _first(self, completion: str, what: Any) -> bool:
        """Whether this is cited for the first time. Twice would make a short request into a long one."""
        known = (completion, what) in self._cited
        self._cited.add((completion, what))
        return not known

    def _once(self, completion: str, what: Any, name: str, where: str) -> None:
        if not self._first(completion, what):
            raise bad(f"Duplicate item found with id '{name:.80}': send it once", f"{where}.id", "duplicate_item")

    def _compaction(self, item: dict[str, Any], where: str) -> None:
        sealed = unseal("compaction", item.get("encrypted_content"))
        if sealed is None:
            raise bad(f"'{where}.encrypted_content' was not issued here", f"{where}.encrypted_content", "invalid_item")
        self.say("user", SUMMARY + sealed[1])

    def _trigger(self, item: dict[str, Any], where: str) -> None:
        self.compact = True

    def _more_tools(self, item: dict[str, Any], where: str) -> None:
        if not self._answered:
            self._tools.offer(items(item, "tools", where), f"{where}.tools")
            return
        told = self._tools.load(items(item, "tools", where), f"{where}.tools")
        self.say("system", "Further tools that can be called from now on:\n" + _lines(told, where))

    def _update(self, item: dict[str, Any], where: str) -> None:
        for key in ("text", "reasoning"):
            if item.get(key) is not None:
                self.updates[key] = fields.obj(item[key], f"{where}.{key}")

    def _nothing(self, item: dict[str, Any], where: str) -> None:
        """Only what a server elsewhere offered; nothing of it can be called here."""

    # Results ---------------------------------------------------------------------------------------------------------

    def _output(self, item: dict[str, Any], where: str) -> str:
        return self.reader.text(item.get("output"), f"{where}.output")

    def _shell_output(self, item: dict[str, Any], where: str) -> str:
        if isinstance(item.get("output"), str):
            return item["output"]
        out = []
        for i, raw in enumerate(items(item, "output", where)):
            here = f"{where}.output[{i}]"
            part = fields.obj(raw, here)
            outcome = fields.obj(part.get("outcome", {}), f"{here}.outcome")
            end = "timed out" if outcome.get("type") == "timeout" else f"exit code {outcome.get('exit_code', 0)}"
            out.append(
                fields.text_at(part, "stdout", here, "") + fields.text_at(part, "stderr", here, "") + f"\n[{end}]"
            )
        return "\n".join(out)

    def _patch_output(self, item: dict[str, Any], where: str) -> str:
        return fields.text_at(item, "output", where, "") or fields.text_at(item, "status", where, "")

    def _search_output(self, item: dict[str, Any], where: str) -> str:
        return _lines(self._tools.load(items(item, "tools", where), f"{where}.tools"), where) or "no tool was found"

    # Calls that another server ran -----------------------------------------------------------------------------------

    def _web(self, item: dict[str, Any], where: str) -> tuple[str, str, str]:
        return "web_search", dumps(item.get("action") or {}, where), "(what was found is not shown)"

    def _files(self, item: dict[str, Any], where: str) -> tuple[str, str, str]:
        found = item.get("results") or []
        return "file_search", dumps({"queries": item.get("queries") or []}, where), dumps(found, where)

    def _code(self, item: dict[str, Any], where: str) -> tuple[str, str, str]:
        outputs = [fields.obj(o, f"{where}.outputs") for o in items(item, "outputs", where)]
        texts = [
            self.reader.image(o.get("url"), where) if o.get("type") == "image" else fields.text_at(o, "logs", where)
            for o in outputs
        ]
        return "code_interpreter", dumps({"code": item.get("code") or ""}, where), "\n".join(texts)

    def _picture(self, item: dict[str, Any], where: str) -> tuple[str, str, str]:
        result = item.get("result")
        shown = (
            self.reader.image(f"data:image/png;base64,{result}", where)
            if isinstance(result, str) and result
            else "failed"
        )
        return "image_generation", dumps({"prompt": item.get("revised_prompt") or ""}, where), shown

    def _mcp(self, item: dict[str, Any], where: str) -> tuple[str, str, str]:
        label, error = fields.text_at(item, "server_label", where), item.get("error")
        told = (
            error
            if isinstance(error, str)
            else dumps(error, where)
            if error
            else fields.text_at(item, "output", where, "")
        )
        return (
            self._tools.name("function", fields.text_at(item, "name", where), label),
            arguments_of("function", item, where),
            told,
        )


_OUTPUTS: dict[str, Callable[[History, dict[str, Any], str], str]] = {
    "function_call_output": History._output,
    "custom_tool_call_output": History._output,
    "local_shell_call_output": History._output,
    "shell_call_output": History._shell_output,
    "apply_patch_call_output": History._patch_output,
    "tool_search_output": History._search_output,
}
_HOSTED: dict[str, Callable[[History, dict[str, Any], str], tuple[str, str, str]]] = {
    "web_search_call": History._web,
    "file_search_call": History._files,
    "code_interpreter_call": History._code,
    "image_generation_call": History._picture,
    "mcp_call": History._mcp,
}
_OTHERS: dict[str, Callable[[History, dict[str, Any], str], None]] = {
    "message": History._message,
    "reasoning": History._reasoning,
    "compaction": History._compaction,
    "compaction_summary": History._compaction,
    "compaction_trigger": History._trigger,
    "additional_tools": History._more_tools,
    "configuration_update": History._update,
    "mcp_list_tools": History._nothing,
    "item_reference": History._reference,
}


def is_reference(item: dict[str, Any]) -> bool:
    return item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item and "id" in item)


def _lines(tools: list[dict[str, Any]], where: str) -> str:
    return "\n".join(dumps(t["function"], where) for t in tools)
