"""Agent-like conversations as request bodies: a system prompt and tools that stay, and a history that grows by a turn."""

from __future__ import annotations

import json
import random

SAID = "The quick brown fox jumps over the lazy dog. " * 2  # what the engine says each turn: about 20 tokens
ASKED = "Look at the output of the command and tell what to do next. " * 12  # about 170 tokens
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{i}",
            "description": "Does one thing of many that an agent may want to be done. " * 4,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}},
        },
    }
    for i in range(8)
]
_WORDS = ["file", "line", "error", "test", "value", "return", "import", "class", "module", "path", "node", "list"]
_WORDS += ["string", "index", "build", "patch"]


class Conversation:
    """Its bodies have about `size` bytes in the middle of `turns` turns. The parts of a body are kept encoded, so that a
    megabyte is put together without being encoded again."""

    def __init__(self, size: int = 0, turns: int = 16, model: str = "policy", asked: str = ASKED):
        self.turns = 0
        self._asked = asked
        head = {"model": model, "stream": True, "tools": TOOLS}
        self._head = json.dumps(head).encode()[:-1] + b', "messages": ['
        self._answer = json.dumps({"role": "assistant", "content": SAID.strip()}).encode()
        per_turn = len(self._question()) + len(self._answer) + 4
        filler = max(500, size - len(self._head) - per_turn * turns // 2)
        system = {"role": "system", "content": f"You are an agent. {random.random()} {text(filler)}"}
        self._messages = [json.dumps(system).encode()]

    def _question(self) -> bytes:
        return json.dumps({"role": "user", "content": f"{self.turns}. {self._asked}"}).encode()

    def body(self) -> list[bytes]:
        """The next turn's request."""
        if self.turns:
            self._messages.append(self._answer)
        self._messages.append(self._question())
        self.turns += 1
        return [self._head, b", ".join(self._messages), b"]}"]


def text(size: int) -> str:
    """Words and numbers as in source code and logs, about `size` characters."""
    rng = random.Random(random.random())
    words = [
        f"{rng.choice(_WORDS)}_{rng.randrange(1000)}" if rng.random() < 0.3 else rng.choice(_WORDS) for _ in range(200)
    ]
    block = " ".join(words) + "\n"
    return (block * (size // len(block) + 1))[:size]
