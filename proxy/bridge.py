"""Extending a conversation by its raw token ids, for a chat template that nobody wrote a bridge for.

What a template adds after an assistant turn is read off a short stub conversation that is rendered together with the new
messages: everything behind the stub turn's closing token. Whether that holds for a template is proven when it is loaded, on
conversations with and without tools: the extension must equal the template's own rendering, token for token. Without the
proof there is no bridge, and every prompt is rendered in full.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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


class TemplateBridge:
    """`roles` are the roles proven for new messages."""

    def __init__(self, stop_ids: frozenset[int]):
        self._stops = stop_ids
        self._stubs: dict[tuple[str, ...], tuple[int, int]] = {}  # by the names of a turn's calls
        self.roles: frozenset[str] = frozenset()

    @classmethod
    def proven(cls, renderer: Any, stop_ids: frozenset[int]) -> TemplateBridge | None:
        """The bridge, if the template passes; roles whose conversations it refuses to render stay unproven."""
        bridge = cls(stop_ids)
        proven: set[str] = set()
        for roles, history, turn, new, tools in _cases():
            outcome = bridge._check(renderer, history, turn, new, tools)
            if outcome is False:
                return None
            if outcome:
                proven |= roles
        bridge.roles = frozenset(proven)
        return bridge if "user" in proven else None

    def extend(
        self, renderer: Any, prompt: np.ndarray, sampled: np.ndarray, response: Message, new: list[Message]
    ) -> np.ndarray | None:
        if not new or any(m["role"] not in self.roles for m in new):
            return None
        try:
            close, tail = self._tail(renderer, response, new)
        except Exception:  # templates raise whatever they like; the full render will say it to the harness
            return None
        # A turn that was cut off (length, abort, stop string) has no closing token of its own.
        closed = len(sampled) > 0 and int(sampled[-1]) in self._stops
        return np.concatenate([prompt, sampled, arrays.ids(tail if closed else [close, *tail])])

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

    def _check(
        self, renderer: Any, history: list[Message], turn: Message, new: list[Message], tools: list[Any] | None
    ) -> bool | None:
        """True proven, False refuted, None if the template can't render this conversation at all."""
        try:
            prompt = renderer.render_ids(history, tools=tools, add_generation_prompt=True)
            full = renderer.render_ids([*history, turn, *new], tools=tools, add_generation_prompt=True)
        except Exception:
            return None
        if full[: len(prompt)] != prompt:
            return False
        end = next((i for i in range(len(prompt), len(full)) if full[i] in self._stops), None)
        if end is None:
            return False
        try:
            close, tail = self._tail(renderer, turn, new)
        except Exception:
            return False
        return full[end] == close and full[end + 1 :] == tail


def _cases() -> list[tuple[set[str], list[Message], Message, list[Message], list[Any] | None]]:
    """(roles proven, history, assistant turn, new messages, tools)."""

    def call(i: int, at: str) -> dict[str, Any]:
        return {"id": f"call_{i}", "type": "function", "function": {"name": "look", "arguments": f'{{"at": "{at}"}}'}}

    def result(i: int, text: str) -> Message:
        return {"role": "tool", "tool_call_id": f"call_{i}", "name": "look", "content": text}

    system: Message = {"role": "system", "content": "You are careful.\nYou look twice."}
    user: Message = {"role": "user", "content": "What is in the box? 箱 🎁"}
    plain: Message = {"role": "assistant", "content": "A cat, I think."}
    one: Message = {"role": "assistant", "content": "", "tool_calls": [call(1, "box")]}
    two: Message = {"role": "assistant", "content": "Both.", "tool_calls": [call(1, "box"), call(2, "lid")]}
    more: Message = {"role": "user", "content": "Are you sure?\n\nLook again."}
    tools = [_TOOL]
    earlier = [system, user, one, result(1, "dark\n")]
    return [
        ({"user"}, [user], plain, [more], None),
        ({"user"}, [system, user], plain, [more], None),
        ({"user"}, [system, user, plain, more], plain, [user, more], None),
        ({"user"}, [system, user], plain, [more], tools),
        ({"tool"}, [system, user], one, [result(1, "a cat")], tools),
        ({"tool"}, [user], two, [result(1, "a cat"), result(2, '{"open": true}')], tools),
        ({"tool"}, earlier, two, [result(1, ""), result(2, "ajar — 蓋")], tools),
        ({"tool"}, earlier, one, [result(1, "a cat"), more], tools),
        ({"system"}, [system, user], plain, [system, more], None),
        ({"system", "tool"}, [system, user], one, [result(1, "a cat"), system], tools),
    ]
