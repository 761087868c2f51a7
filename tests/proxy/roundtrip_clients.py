"""The smallest honest client of each dialect: builds bodies, reads answers of both forms, and echoes them as they came."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from proxy.dialects.base import Call

SCHEMA = {"type": "object", "properties": {}}


class Said(NamedTuple):
    """An answer in no dialect's words: calls are (id or "", name, arguments)."""

    reasoning: str
    text: str
    calls: list[tuple[str, str, Any]]


class Client:
    """`history` holds what the client would send back, in its own form."""

    name: str

    def __init__(self) -> None:
        self.history: list[Any] = []

    def call(self, stream: bool) -> Call:
        """What the path and the query say."""
        return Call()

    def ask(self, text: str) -> None: ...

    def results(self, calls: list[tuple[str, str, Any]], texts: list[str]) -> None: ...

    def body(self, system: str, stream: bool) -> dict[str, Any]: ...

    def stream(self, data: bytes) -> Any:
        """The answer that a stream's bytes add up to, as whole() would have given it."""
        ...

    def said(self, answer: Any) -> Said: ...

    def echo(self, answer: Any) -> None: ...


def events(data: bytes) -> list[dict[str, Any]]:
    out = []
    for block in data.decode("utf-8").split("\n\n"):
        lines = [line[5:].strip() for line in block.split("\n") if line.startswith("data:")]
        if lines and lines[0] != "[DONE]":
            out.append(json.loads("".join(lines)))
    return out


class Chat(Client):
    name = "openai_chat"

    def ask(self, text):
        self.history.append({"role": "user", "content": text})

    def results(self, calls, texts):
        for (own, _, _), text in zip(calls, texts, strict=True):
            self.history.append({"role": "tool", "tool_call_id": own, "content": text})

    def body(self, system, stream):
        tools = [{"type": "function", "function": {"name": "run", "parameters": SCHEMA}}]
        messages = [{"role": "system", "content": system}, *self.history]
        return {"model": "m", "messages": messages, "tools": tools, "stream": stream}

    def stream(self, data):
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        for chunk in events(data):
            for choice in chunk["choices"]:
                delta = choice["delta"]
                for key in ("content", "reasoning_content"):
                    if delta.get(key):
                        message[key] = message.get(key, "") + delta[key]
                for c in delta.get("tool_calls", ()):
                    message.setdefault("tool_calls", []).append({k: v for k, v in c.items() if k != "index"})
        return message

    def said(self, answer):
        message = answer["choices"][0]["message"] if "choices" in answer else answer
        calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
        return Said(message.get("reasoning_content") or "", message["content"] or "", calls)

    def echo(self, answer):
        self.history.append(answer["choices"][0]["message"] if "choices" in answer else answer)


class Anthropic(Client):
    name = "anthropic"

    def ask(self, text):
        self.history.append({"role": "user", "content": text})

    def results(self, calls, texts):
        blocks = [
            {"type": "tool_result", "tool_use_id": own, "content": text}
            for (own, _, _), text in zip(calls, texts, strict=True)
        ]
        self.history.append({"role": "user", "content": blocks})

    def body(self, system, stream):
        tools = [{"name": "run", "description": "", "input_schema": SCHEMA}]
        return {
            "model": "m",
            "max_tokens": 100,
            "system": system,
            "messages": self.history,
            "tools": tools,
            "stream": stream,
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        }

    def stream(self, data):
        blocks: list[dict[str, Any]] = []
        for e in events(data):
            if e["type"] == "content_block_start":
                blocks.append(dict(e["content_block"]))
                blocks[-1]["json"] = ""
            elif e["type"] == "content_block_delta":
                block, d = blocks[e["index"]], e["delta"]
                for kind in ("text", "thinking", "signature"):
                    if kind in d:
                        block[kind] = block.get(kind, "") + d[kind]
                block["json"] += d.get("partial_json", "")
        for b in blocks:
            text = b.pop("json")
            if b["type"] == "tool_use":
                b["input"] = json.loads(text or "{}")
        return {"content": blocks}

    def said(self, answer):
        blocks = answer["content"]
        return Said(
            "".join(b["thinking"] for b in blocks if b["type"] == "thinking"),
            "".join(b["text"] for b in blocks if b["type"] == "text"),
            [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"],
        )

    def echo(self, answer):
        self.history.append({"role": "assistant", "content": answer["content"]})


class Responses(Client):
    name = "openai_responses"

    def ask(self, text):
        self.history.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})

    def results(self, calls, texts):
        for (own, _, _), text in zip(calls, texts, strict=True):
            self.history.append({"type": "function_call_output", "call_id": own, "output": text})

    def body(self, system, stream):
        tools = [{"type": "function", "name": "run", "parameters": SCHEMA, "strict": False}]
        more = {"store": False, "include": ["reasoning.encrypted_content"]}
        return {"model": "m", "instructions": system, "input": self.history, "tools": tools, "stream": stream} | more

    def stream(self, data):
        done = [e for e in events(data) if e["type"] == "response.completed"]
        items = [e["item"] for e in events(data) if e["type"] == "response.output_item.done"]
        assert done[0]["response"]["output"] == items
        return done[0]["response"]

    def said(self, answer):
        def texts(kind: str, field: str) -> str:
            parts = [p for i in answer["output"] if i["type"] == kind for p in i.get(field) or i.get("summary") or ()]
            return "".join(p["text"] for p in parts)

        calls = [(i["call_id"], i["name"], i["arguments"]) for i in answer["output"] if i["type"] == "function_call"]
        return Said(texts("reasoning", "content"), texts("message", "content"), calls)

    def echo(self, answer):
        self.history += answer["output"]


class Google(Client):
    name = "google"

    def call(self, stream):
        verb = "streamGenerateContent" if stream else "generateContent"
        return Call(params={"model": "m", "verb": verb}, query={"alt": "sse"} if stream else {})

    def ask(self, text):
        self.history.append({"role": "user", "parts": [{"text": text}]})

    def results(self, calls, texts):
        parts = [
            {"functionResponse": {"id": own, "name": name, "response": {"output": text}}}
            for (own, name, _), text in zip(calls, texts, strict=True)
        ]
        self.history.append({"role": "user", "parts": parts})

    def body(self, system, stream):
        declared = [{"name": "run", "description": "", "parametersJsonSchema": SCHEMA}]
        return {
            "systemInstruction": {"parts": [{"text": system}]},
            "contents": self.history,
            "tools": [{"functionDeclarations": declared}],
            "generationConfig": {"thinkingConfig": {"includeThoughts": True}},
        }

    def stream(self, data):
        parts: list[dict[str, Any]] = []
        for chunk in events(data):
            for candidate in chunk.get("candidates", ()):
                parts += candidate.get("content", {}).get("parts", ())
        return {"candidates": [{"content": {"role": "model", "parts": parts}}]}

    def said(self, answer):
        parts = answer["candidates"][0]["content"].get("parts", [])
        return Said(
            "".join(p.get("text", "") for p in parts if p.get("thought")),
            "".join(p.get("text", "") for p in parts if not p.get("thought")),
            [(c["id"], c["name"], c["args"]) for p in parts if (c := p.get("functionCall"))],
        )

    def echo(self, answer):
        self.history.append(answer["candidates"][0]["content"])


CLIENTS: dict[str, type[Client]] = {c.name: c for c in (Chat, Anthropic, Responses, Google)}
