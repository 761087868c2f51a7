"""Which earlier completion a request continues, and the prompt ids that follow from it."""

from __future__ import annotations

import hashlib
from array import array

import msgspec
import numpy as np
from msgspec import Struct

from polar.completion import Link, Role
from proxy import history
from proxy.attempt import Attempt, Node
from proxy.codec import Codec
from proxy.neutral import Message, Request

_CANDIDATES = 6  # latest completions compared token by token when a prompt was rendered in full
_WORTH = 16  # a shorter common beginning is not worth a reference


class Plan(Struct, kw_only=True):
    """A prompt (int32) and where it comes from: its first `shared` ids are those of `parent`'s prompt + sampled ids, and
    `message_shared` messages are the parent's (its response included)."""

    prompt: np.ndarray
    link: Link
    reason: str
    role: Role
    parent: Node | None = None
    shared: int = 0
    message_shared: int = 0


class Match(Struct, kw_only=True):
    """What the index says about a request: `again` is the first completion of the same request; `parent` the completion
    that it continues; `near` one that it would continue but for an edit."""

    again: Node | None = None
    latest: Node | None = None
    parent: Node | None = None
    near: Node | None = None
    reason: str = ""


def request_hash(dialect: str, request: Request) -> str:
    h = hashlib.blake2b(dialect.encode() + b"\0", digest_size=16)
    h.update(request.identity)
    return h.hexdigest()


def tools_hash(request: Request) -> str:
    if not request.tools:
        return ""
    return hashlib.blake2b(msgspec.json.encode(request.tools), digest_size=16).hexdigest()


def match(attempt: Attempt, request: Request, digests: array, same: str, tools: str, model: str) -> Match:
    if earlier := attempt.by_request.get(same):
        return Match(again=earlier[0], latest=earlier[-1])
    last = max((i for i, m in enumerate(request.messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        return Match(reason="no assistant turn in the request")
    turn = request.messages[last]
    ids = history.call_ids(turn)
    found = attempt.by_history.get(digests[last + 1], [])
    # Several samples may read the same; the ids of their calls tell them apart, else the latest is meant.
    node = next(
        (n for n in reversed(found) if ids and history.call_ids(n.response) == ids), found[-1] if found else None
    )
    if node is None:
        return _edited(attempt, digests, last, ids)
    ours = node.response.get("reasoning_content") or ""
    if not history.same_reasoning(ours, turn.get("reasoning_content") or ""):
        return Match(near=node, reason="reasoning of the last turn was edited")
    if node.tools_hash != tools:
        return Match(near=node, reason="tools changed")
    if node.model != model:
        return Match(near=node, reason="model changed")
    if last == len(request.messages) - 1:
        return Match(near=node, reason="the request ends with an assistant turn")
    return Match(parent=node)


def _edited(attempt: Attempt, digests: array, last: int, ids: list[str]) -> Match:
    if before := attempt.by_prompt.get(digests[last]):
        return Match(near=before[-1], reason="the assistant turn was edited")
    for call in ids:
        if call in attempt.by_call:
            return Match(near=attempt.by_call[call], reason="the history before the last turn was edited")
    return Match(reason="no completion of this attempt leads here")


async def plan(attempt: Attempt, codec: Codec, request: Request, digests: array, found: Match, tools: str) -> Plan:
    """The prompt for a request. Raises CallError if the template refuses the messages."""
    if found.again is not None:
        return _sibling(attempt, digests, found)
    reason = found.reason
    if found.parent is not None:
        parent = found.parent
        full = attempt.full(parent)
        new = request.messages[len(parent.digests) - 1 :]
        prompt = await codec.extend(full[: parent.prompt_length], parent.sampled, parent.response, new, request.tools)
        if prompt is not None:
            shared = common(full, prompt)
            role, count = parent.role, len(parent.digests) - 1
            return Plan(
                prompt=prompt,
                link="continued",
                reason="",
                role=role,
                parent=parent,
                shared=shared,
                message_shared=count,
            )
        reason = "the renderer renders this turn anew"
    first = not attempt.nodes
    prompt = await codec.render(request.messages, request.tools)
    near = found.parent or found.near
    link: Link = "rewritten" if near is not None else "first" if first else "new_chain"
    role = near.role if near is not None else _role(attempt, request, tools)
    out = Plan(prompt=prompt, link=link, reason="" if first else reason, role=role)
    _share(attempt, out, digests, near)
    return out


def _sibling(attempt: Attempt, digests: array, found: Match) -> Plan:
    first, latest = found.again, found.latest
    assert first is not None and latest is not None
    reason = (
        "the same request again after its answer" if latest.whole else "the same request again after a broken answer"
    )
    shared = history.shared(digests, first.parent.digests) if first.parent is not None else 0
    return Plan(
        prompt=attempt.prompt(first),
        link="sibling",
        reason=reason,
        role=first.role,
        parent=first.parent,
        shared=first.shared,
        message_shared=max(shared, 0),
    )


def _share(attempt: Attempt, out: Plan, digests: array, near: Node | None) -> None:
    """Store a fully rendered prompt as a reference to the completion that shares most of it."""
    candidates = {n.id: n for n in list(attempt.nodes.values())[-_CANDIDATES:]}
    if near is not None:
        candidates[near.id] = near
    if attempt.nodes:
        closest = max(attempt.nodes.values(), key=lambda n: history.shared(digests, n.digests))
        candidates[closest.id] = closest
    best, length = None, _WORTH - 1
    for node in candidates.values():
        if (n := common(attempt.full(node), out.prompt)) > length:
            best, length = node, n
    if best is not None:
        out.parent, out.shared = best, length
        out.message_shared = max(history.shared(digests, best.digests), 0)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _role(attempt: Attempt, request: Request, tools: str) -> Role:
    """A hint only: harnesses don't say what a new conversation is for."""
    if not attempt.nodes:
        return "main" if tools else "unknown"
    mains = [n for n in attempt.nodes.values() if n.role == "main"]
    if not tools:
        return "auxiliary" if any(n.tools_hash for n in mains) else "unknown"
    if mains and all(n.tools_hash != tools for n in mains):
        return "subagent"
    return "unknown"


def stored_messages(request: Request, plan: Plan) -> list[Message]:
    return request.messages[plan.message_shared :]
