"""What is kept of a generation, and what its client is told at the end."""

from __future__ import annotations

import time
from typing import Any

from msgspec import Struct

from polar import arrays
from polar.completion import Completion, FinishReason
from polar.store.capture import Grant
from proxy import linking
from proxy.attempt import Node
from proxy.codec import Codec
from proxy.engines.base import Sample
from proxy.linking import Plan
from proxy.neutral import Finish, Message, Request, Usage
from proxy.table import Served


class Made(Struct, frozen=True, kw_only=True):
    """How a sample came about. `sampling` is what was really used; `started` in Unix seconds."""

    id: str
    grant: Grant
    served: Served
    request: Request
    request_hash: str
    dialect: str
    plan: Plan
    index: int
    tools_hash: str
    sampling: dict[str, Any]
    started: float


def completion(m: Made, s: Sample, message: Message, delivered: bool) -> Completion:
    request, plan, parent = m.request, m.plan, m.plan.parent
    return Completion(
        completion_id=m.id,
        session_id=m.grant.session_id,
        attempt=m.grant.attempt,
        index=m.index,
        parent_id=parent.id if parent is not None else None,
        link=plan.link,
        link_reason=plan.reason,
        prompt_shared=plan.shared,
        prompt_tail=plan.prompt[plan.shared :],
        sampled_ids=arrays.ids(s.ids),
        logprobs=arrays.floats(s.logprobs),
        versions=s.versions,
        untrainable=s.untrainable,
        finish_reason=_reason(s, message),
        # What an engine says beside the tokens must not cost them: these can't be stored as they are.
        stop_matched=None if isinstance(s.stop_matched, int) and abs(s.stop_matched) >= 1 << 31 else s.stop_matched,
        sampling=m.sampling,
        requested_sampling=request.wishes,
        model=m.served.key,
        engine=m.served.engine.name,
        dialect=m.dialect,
        stream=request.stream,
        role=plan.role,
        labels=request.labels,
        request_hash=m.request_hash,
        delivered=delivered,
        message_shared=plan.message_shared,
        messages=linking.stored_messages(request, plan),
        tools_hash=m.tools_hash,
        tools=[] if parent is not None and parent.tools_hash == m.tools_hash else request.tools,
        response=message,
        cached_tokens=max(0, min(s.cached_tokens, len(plan.prompt) or s.prompt_tokens, (1 << 31) - 1)),
        started_at=m.started,
        first_token_at=s.first_token_at,
        finished_at=time.time(),
    )


def _reason(s: Sample, message: Message) -> FinishReason:
    if s.end == "length" or s.end == "abort":
        return s.end
    if s.end == "failed":
        return "error"
    return "tool_calls" if message.get("tool_calls") else "stop"


def finish(c: Completion, s: Sample, codec: Codec) -> Finish:
    """The last event of the answer. Where the tokens aren't known, the server's own counts are told."""
    usage = Usage(
        prompt_tokens=c.prompt_length or s.prompt_tokens,
        sampled_tokens=len(c.sampled_ids) or s.sampled_tokens,
        cached_tokens=c.cached_tokens,
        reasoning_tokens=codec.reasoning_tokens(c.sampled_ids.tolist(), c.response),
    )
    return _finish(c.finish_reason, usage, c.stop_matched)


def finish_again(node: Node, codec: Codec) -> Finish:
    """The last event of an answer that is given again."""
    prompt, sampled, cached = node.usage
    reasoning = codec.reasoning_tokens(node.sampled.tolist(), node.response)
    usage = Usage(prompt_tokens=prompt, sampled_tokens=sampled, cached_tokens=cached, reasoning_tokens=reasoning)
    return _finish(node.finish_reason, usage, node.stop_matched)


def _finish(reason: str, usage: Usage, matched: int | str | None) -> Finish:
    # Only whole answers get here.
    return Finish(reason=reason, usage=usage, stop_sequence=matched if isinstance(matched, str) else None)  # type: ignore[arg-type]
