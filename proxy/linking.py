"""Which earlier completion a request continues, and the prompt ids that follow from it.

A request continues a completion if its history is, message for message, what that completion saw and said. Ids that came
back in the history (of tool calls, signatures, items) say which one is meant where several read the same; they never stand
in for that comparison, so that a wrong or forged one costs a full render at worst.
"""

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
_NAMED = 64  # ids looked up per turn


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
        whole = [n for n in earlier if n.whole]
        return Match(again=earlier[0], latest=(whole or earlier)[-1])
    last = max((i for i, m in enumerate(request.messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        return _unanswered(attempt, request, digests)
    turn = request.messages[last]
    ids, refs = history.call_ids(turn), history.refs(turn)
    found = attempt.by_history.get(digests[last + 1], [])
    named = [n for n in found if n.id in refs or (ids and history.call_ids(n.response) == ids)]
    if not named and (others := _others(attempt, ids, refs)):
        return _edited(request, digests, last, max(others, key=lambda n: history.shared(digests, n.digests)))
    usable = [n for n in found if n.model == model and n.tools_hash == tools]
    node = _meant(usable or found, named, turn)
    if node is None:
        return _unnamed(attempt, request, digests, last)
    if node.model != model:
        return Match(near=node, reason="model changed")
    if node.tools_hash != tools:
        reordered = node.tools_set == history.unordered(request.tools)
        return Match(near=node, reason="the order of the tools changed" if reordered else "tools changed")
    if last == len(request.messages) - 1:
        return Match(near=node, reason="the request ends with an assistant turn")
    return Match(parent=node)


def _others(attempt: Attempt, ids: list[str], refs: list[str]) -> list[Node]:
    """Completions that a turn's ids belong to. Ids that none has are the harness's own."""
    out = [attempt.nodes[r] for r in refs[:_NAMED] if r in attempt.nodes]
    for i in ids[:_NAMED]:
        out += attempt.by_call.get(i, ())[-_NAMED:]
    return out


def _meant(found: list[Node], named: list[Node], turn: Message) -> Node | None:
    """Of completions that read the same: the one that is named, else the one whose reasoning came back, else the latest
    that its client got."""
    theirs = history.reasoning(turn)

    def rank(n: Node) -> tuple[bool, bool, bool]:
        return n in named, bool(theirs) and history.reasoning(n.response) == theirs, n.delivered

    return max(reversed(found), key=rank, default=None)


def _unanswered(attempt: Attempt, request: Request, digests: array) -> Match:
    """No assistant turn: a new conversation, unless it begins with a prompt that was answered."""
    if (near := _answered(attempt, digests, len(request.messages))) is not None:
        return Match(near=near, reason=f"the answer after message {len(near.digests) - 2} was left out")
    return Match(reason="no assistant turn in the request")


def _answered(attempt: Attempt, digests: array, upto: int) -> Node | None:
    """A completion of the longest beginning of the history that is the prompt of one."""
    for k in range(upto, 0, -1):
        if before := attempt.by_prompt.get(digests[k]):
            return before[-1]
    return None


def _unnamed(attempt: Attempt, request: Request, digests: array, last: int) -> Match:
    if before := attempt.by_prompt.get(digests[last]):
        return _edited(request, digests, last, before[-1])
    alike = attempt.by_turn.get(history.step(0, request.messages[last]), ())
    if alike := [n for n in alike if len(n.digests) - 2 == last]:
        return _edited(request, digests, last, alike[-1])
    if (near := _answered(attempt, digests, last)) is not None:
        return _edited(request, digests, last, near)
    return Match(reason="no completion of this attempt leads here")


def _edited(request: Request, digests: array, last: int, near: Node) -> Match:
    """Why a request doesn't continue `near`, which its history comes close to."""
    same = history.shared(digests, near.digests)
    seen = len(near.digests) - 2  # messages of its prompt
    if same < min(seen, last):
        m = request.messages[same]
        what = "the system prompt" if m["role"] == "system" and same == 0 else f"message {same} ({m['role']})"
        return Match(near=near, reason=f"{what} was edited, added or left out")
    if seen != last:
        return Match(near=near, reason="turns before the last one were left out or added")
    turn, ours = request.messages[last], near.response
    plain: Message = {**turn, "reasoning_content": ""}
    if history.step(0, plain) == history.step(0, ours):
        return Match(near=near, reason="reasoning of the last turn was edited")
    if turn["content"].strip() != ours["content"].strip():
        return Match(near=near, reason="the text of the last turn was edited")
    return Match(near=near, reason="the calls of the last turn were edited")


async def plan(
    attempt: Attempt, codec: Codec, request: Request, digests: array, found: Match, tools: str, model: str
) -> Plan:
    """The prompt for a request. Raises CallError if the template refuses the messages."""
    if found.again is not None:
        return _sibling(request, attempt, digests, found)
    reason = found.reason
    if found.parent is not None:
        parent = found.parent
        full = attempt.full(parent)
        count = len(parent.digests) - 1
        new = request.messages[count:]
        prompt, why = await codec.extended(
            full[: parent.prompt_length], parent.sampled, parent.response, new, request.tools
        )
        if prompt is not None:
            return Plan(
                prompt=prompt,
                link="continued",
                reason="",
                role=request.role or _inherited(parent),
                parent=parent,
                shared=common(full, prompt),
                message_shared=count,
            )
        reason = why
    first = not attempt.nodes
    prompt = await codec.render(request.messages, request.tools)
    near = found.parent or found.near
    link: Link = "rewritten" if near is not None else "first" if first else "new_chain"
    role = _inherited(near) if near is not None else _role(attempt, request, tools)
    out = Plan(prompt=prompt, link=link, reason="" if first else reason, role=request.role or role)
    _share(attempt, out, request, digests, model, near)
    return out


def _sibling(request: Request, attempt: Attempt, digests: array, found: Match) -> Plan:
    first, latest = found.again, found.latest
    assert first is not None and latest is not None
    reason = (
        "the same request again after its answer" if latest.whole else "the same request again after a broken answer"
    )
    return Plan(
        prompt=attempt.prompt(first),
        link="sibling",
        reason=reason,
        role=request.role or first.role,
        parent=first.parent,
        shared=first.shared,
        message_shared=_boundary(request, digests, first.parent) if first.parent is not None else 0,
    )


def _share(attempt: Attempt, out: Plan, request: Request, digests: array, model: str, near: Node | None) -> None:
    """Store a fully rendered prompt as a reference to the completion that shares most of it."""
    own = [n for n in attempt.nodes.values() if n.model == model]
    candidates = own[-_CANDIDATES:]
    if own:
        candidates.append(max(own, key=lambda n: history.shared(digests, n.digests)))
    if near is not None and near.model == model:
        candidates.append(near)
    best, length = None, _WORTH - 1
    for node in dict.fromkeys(candidates):
        if (n := common(attempt.full(node), out.prompt)) > length:
            best, length = node, n
    if best is not None:
        out.parent, out.shared = best, length
        out.message_shared = _boundary(request, digests, best)


def _boundary(request: Request, digests: array, parent: Node) -> int:
    """How many messages to take from a parent's: tool results stay with the turn whose calls they answer."""
    k = history.shared(digests, parent.digests)
    if k < len(parent.digests) - 1:
        while k and k < len(request.messages) and request.messages[k]["role"] == "tool":
            k -= 1
    return k


def _inherited(node: Node) -> Role:
    return "unknown" if node.role == "compaction" else node.role


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
