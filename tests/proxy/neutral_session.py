"""A session below HTTP: neutral requests are linked, answered with given text, and stored, as the proxy does it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polar import arrays
from polar.codec import pack, unpack
from polar.completion import Completion, resolve_prompts
from proxy import linking
from proxy.attempt import Attempt
from proxy.codec import PROMPT_TAIL, Codec
from proxy.neutral import Event, Finish, Message, Request, Usage
from proxy.stream_parser import StreamParser

TOOLS = [
    {"type": "function", "function": {"name": n, "description": "", "parameters": {"type": "object", "properties": {}}}}
    for n in ("run", "read")
]


def call(name: str = "run", **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def result(turn: Message, text: str = "ok", n: int = 0) -> Message:
    return {"role": "tool", "tool_call_id": turn["tool_calls"][n]["id"], "content": text}


class Served(NamedTuple):
    events: list[Event]
    completion: Completion


class NeutralSession:
    def __init__(self, codec: Codec):
        self.codec = codec
        self.attempt = Attempt("s.1")
        self.stored: list[Completion] = []

    async def ask(
        self,
        messages: list[Message],
        says: str = "Done.",
        *,
        tools: list = TOOLS,
        model: str = "policy",
        end: bool = True,
        delivered: bool = True,
        prefix: str = "",
        **said,
    ) -> tuple[Message, Completion]:
        """(the answer as the harness gets it, what was stored). `prefix` makes call ids of the model's own."""
        request = Request(model=model, messages=[dict(m) for m in messages], tools=tools, **said)
        request.identity = json.dumps([messages, tools, model]).encode()
        served = await self.serve(request, says, end=end, delivered=delivered, prefix=prefix)
        return dict(served.completion.response), served.completion

    async def serve(
        self,
        request: Request,
        says: str,
        sizes: Sequence[int] = (),
        *,
        end: bool = True,
        delivered: bool = True,
        prefix: str = "",
    ) -> Served:
        """Answer with a sample that decodes to `says`, which comes in pieces of `sizes` tokens."""
        attempt, codec, model = self.attempt, self.codec, request.model
        digests = attempt.read(request.messages)
        same, hashed = linking.request_hash("neutral", request), linking.tools_hash(request)
        found = linking.match(attempt, request, digests, same, hashed, model)
        plan = await linking.plan(attempt, codec, request, digests, found, hashed, model)
        ids = codec._tokenizer.encode(says, add_special_tokens=False) + [max(codec.stop_ids)] * end
        name = f"c-{len(self.stored)}"
        parser = StreamParser(
            codec,
            plan.prompt[-PROMPT_TAIL:].tolist(),
            request.tools,
            request.calls_allowed,
            request.stop,
            prefix or f"call_{name}",
        )
        events: list[Event] = []
        at = 0
        for n in [*sizes, len(ids)]:
            events += parser.feed(ids[at : at + n])
            at += n
        response, rest = parser.finish(None)
        parent = plan.parent
        completion = Completion(
            completion_id=name,
            session_id="s",
            attempt=1,
            index=len(self.stored),
            parent_id=parent.id if parent else None,
            link=plan.link,
            link_reason=plan.reason,
            prompt_shared=plan.shared,
            prompt_tail=plan.prompt[plan.shared :],
            sampled_ids=arrays.ids(ids),
            logprobs=np.zeros(len(ids), np.float32),
            finish_reason="tool_calls" if response.get("tool_calls") else "stop",
            model=model,
            role=plan.role,
            request_hash=same,
            delivered=delivered,
            message_shared=plan.message_shared,
            messages=linking.stored_messages(request, plan),
            tools_hash=hashed,
            tools=[] if parent is not None and parent.tools_hash == hashed else request.tools,
            response=response,
        )
        self.stored.append(unpack(pack(completion), Completion))  # as it comes out of the store
        assert attempt.add(completion) is not None
        await self._check(request, plan.prompt)
        usage = Usage(prompt_tokens=len(plan.prompt), sampled_tokens=len(ids))
        finish = Finish(reason=completion.finish_reason, usage=usage)
        return Served([*events, *rest, finish], completion)

    async def _check(self, request: Request, prompt: np.ndarray) -> None:
        """The laws that hold for every request."""
        c = self.stored[-1]
        prompts = resolve_prompts(self.stored)
        assert prompts[c.completion_id].tolist() == prompt.tolist() == self.attempt.prompt(self.node(c)).tolist()
        if c.link == "continued":
            parent = next(p for p in self.stored if p.completion_id == c.parent_id)
            whole = [*prompts[parent.completion_id].tolist(), *parent.sampled_ids.tolist()]
            assert prompt[: len(whole)].tolist() == whole, "a continued prompt goes on with what was really sampled"
        elif c.link != "sibling":
            rendered = await self.codec.render(request.messages, request.tools)
            assert prompt.tolist() == rendered.tolist(), "any other prompt says what the history says"
        # Another proxy, which only reads the stream, knows the same.
        other = Attempt("s.1")
        for stored in self.stored:
            other.add(stored)
        assert other.nodes[c.completion_id].digests == self.node(c).digests

    def node(self, c: Completion):
        return self.attempt.nodes[c.completion_id]
