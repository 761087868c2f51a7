"""Extending a conversation by its raw token ids, for a chat template that nobody wrote a bridge for.

What a template adds after an assistant turn is read off a short stub conversation that is rendered together with the new
messages: everything behind the stub turn's closing token. Whether that holds for a template is proven when it is loaded: on
conversations with and without tools the extension must equal the template's own rendering, token for token. Where a
template leaves earlier reasoning out of its rendering, what comes behind the last turn must still be equal (going on with
what was really sampled is the point). Kinds of messages without the proof are rendered in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct

from polar import arrays
from proxy.neutral import Message

_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a thing.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}


class Case(Struct, frozen=True):
    """A conversation that proves, or refutes, `roles` as new messages. With `drops` its history may be rendered otherwise
    once it goes on."""

    roles: frozenset[str]
    history: list[Message]
    turn: Message
    new: list[Message]
    tools: list[Any] | None = None
    drops: bool = False


class TemplateBridge:
    """`roles` are the roles proven for new messages; `refuted` says why the others are not, by role."""

    def __init__(self, stop_ids: frozenset[int]):
        self._stops = stop_ids
        self._stubs: dict[tuple[str, ...], tuple[int, int]] = {}  # by the names of a turn's calls
        self.roles: frozenset[str] = frozenset()
        self.refuted: dict[str, str] = {}

    @classmethod
    def proven(cls, renderer: Any, stop_ids: frozenset[int]) -> tuple[TemplateBridge | None, str]:
        """The bridge if the template passes, else why not. Conversations that it refuses to render prove nothing."""
        bridge = cls(stop_ids)
        proven: set[str] = set()
        for case in _cases():
            why = bridge._check(renderer, case)
            if why == "":
                proven |= case.roles
            elif why is not None:
                for role in case.roles:
                    bridge.refuted.setdefault(role, why)
        bridge.roles = frozenset(proven - bridge.refuted.keys())
        if "user" in bridge.roles:
            return bridge, ""
        return None, bridge.refuted.get("user", "it refuses a conversation of two questions")

    def extend(
        self, renderer: Any, prompt: np.ndarray, sampled: np.ndarray, response: Message, new: list[Message]
    ) -> tuple[np.ndarray | None, str]:
        """The extended ids (n,), or None and why."""
        if not new:
            return None, "nothing follows the turn"
        for role in (m["role"] for m in new):
            if role not in self.roles:
                why = self.refuted.get(role, "the template refuses such messages")
                return None, f"the bridge is not proven for a message of role {role}: {why}"
        try:
            close, tail = self._tail(renderer, response, new)
        except Exception as e:  # templates raise whatever they like; the full render will say it to the harness
            return None, f"the bridge failed: {' '.join(str(e).split())[:200] or type(e).__name__}"
        # A turn that was cut off (length, abort, stop string) has no closing token of its own.
        closed = len(sampled) > 0 and int(sampled[-1]) in self._stops
        return np.concatenate([prompt, sampled, arrays.ids(tail if closed else [close, *tail])]), ""

    def _tail(self, renderer: Any, response: Message, new: list[Message]) -> tuple[int, list[int]]:
        """The closing token, and what the template puts between it and the next sampled token."""
        stub: Message = {"role": "assistant", "content": "b"}
        if response.get("tool_calls"):
            # Some templates look up the names of the calls that results belong to.
            stub["tool_calls"] = [
                {"id": c["id"], "type": "function", "function": {"name": c["function"]["name"], "arguments": "{}"}}
                for c in response["tool_calls"]
            ]
        base = [{"role": "user", "content": "a"}, stub]
        nth, close = self._closing(renderer, base)
        extended = renderer.render_ids(base + new, add_generation_prompt=True)
        at = [i for i, t in enumerate(extended) if t in self._stops][nth - 1]
        if extended[at] != close:
            raise ValueError("the template closes turns in different ways")
        return close, extended[at + 1 :]

    def _closing(self, renderer: Any, base: list[Message]) -> tuple[int, int]:
        """How many stop tokens the stub conversation has, and its last one, which closes the assistant turn."""
        key = tuple(c["function"]["name"] for c in base[1].get("tool_calls", ()))
        if key not in self._stubs:
            stops = [t for t in renderer.render_ids(base) if t in self._stops]
            if not stops:
                raise ValueError("the template doesn't close an assistant turn with a stop token")
            if len(self._stubs) > 1000:
                self._stubs.clear()
            self._stubs[key] = len(stops), stops[-1]
        return self._stubs[key]

    def _check(self, renderer: Any, case: Case) -> str | None:
        """ "" if proven, a reason if refuted, None if the template can't render this conversation at all."""
        try:
            prompt = renderer.render_ids(case.history, tools=case.tools, add_generation_prompt=True)
            full = renderer.render_ids(
                [*case.history, case.turn, *case.new], tools=case.tools, add_generation_prompt=True
            )
        except Exception:
            return None
        try:
            close, tail = self._tail(renderer, case.turn, case.new)
        except Exception as e:
            return f"no stub could be rendered ({' '.join(str(e).split())[:100]})"
        behind = [close, *tail]
        if full[-len(behind) :] != behind:
            return "what follows a turn depends on what came before it"
        if case.drops:
            return ""
        if full[: len(prompt)] != prompt:
            return "a prompt is rendered otherwise once the conversation goes on"
        if any(t in self._stops for t in full[len(prompt) : -len(behind)]):
            return "a turn holds a stop token"
        return ""


def _cases() -> list[Case]:
    def call(i: int, at: str) -> dict[str, Any]:
        return {"id": f"call_{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{at}"}}'}}

    def result(i: int, text: str) -> Message:
        return {"role": "tool", "tool_call_id": f"call_{i}", "name": "look", "content": text}

    def asks(text: str) -> Message:
        return {"role": "user", "content": text}

    def says(text: str, *calls: dict[str, Any], **more: str) -> Message:
        return {"role": "assistant", "content": text, **more} | ({"tool_calls": list(calls)} if calls else {})

    system: Message = {"role": "system", "content": "You are careful.\nYou look twice."}
    late: Message = {"role": "system", "content": "Hurry."}
    user, more, blank = asks("What is in the box? 箱 🎁"), asks("Are you sure?\n\nLook again."), asks("")
    edges = asks("  e\u0301\u00a0\n\n ")
    plain = says("A cat, I think.")
    one, two = says("", call(1, "box")), says("Both.", call(1, "box"), call(2, "lid"))
    thought = says("So it is.", reasoning_content="Let me think.\n\nIt moves.")
    acted = says("", call(1, "box"), reasoning_content="I must look.")
    results = [result(1, "a cat"), result(2, '{"open": true}'), result(1, "\n"), result(2, "蓋 👩\u200d👧")]
    tools = [_TOOL]
    earlier = [system, user, one, result(1, "dark\n")]
    u, t, s = frozenset({"user"}), frozenset({"tool"}), frozenset({"system"})
    return [
        Case(u, [user], plain, [more]),
        Case(u, [system, user], plain, [more]),
        Case(u, [system, user, plain, more], plain, [user, more]),
        Case(u, [system, user], plain, [more], tools),
        Case(u, [system, user], plain, [blank]),
        Case(u, [system, user], plain, [edges, blank, user]),
        Case(u, [user, thought, more], thought, [more], drops=True),
        Case(t, [system, user], one, [result(1, "a cat")], tools),
        Case(t, [user], two, results[:2], tools),
        Case(t, [user], two, results, tools),
        Case(t, earlier, two, [result(1, ""), result(2, "ajar — 蓋")], tools),
        Case(t, earlier, one, [result(1, "a cat"), more], tools),
        Case(t, [system, user, acted, result(1, "dark")], acted, [result(1, "a cat")], tools, drops=True),
        Case(t, [user, thought, more], acted, [result(1, "a cat"), more], tools, drops=True),
        Case(s, [system, user], plain, [late, more]),
        Case(s, [system, user], plain, [late, late]),
        Case(s, [system, user], one, [result(1, "a cat"), late], tools),
        Case(s, [system, user], plain, [more, {"role": "system", "content": ""}]),
    ]
