"""Calls that a server renders by itself: which completion they continue, and what may be said of their tokens.

The proxy's own rendering serves to see whether a prompt fits, and is never stored: nothing says that the server's is the
same. Stored are the ids that the server says it used, or none.
"""

from __future__ import annotations

from array import array

from polar import arrays
from polar.completion import Link
from proxy import linking
from proxy.attempt import Attempt
from proxy.codec import Codec
from proxy.engines.base import Sample
from proxy.failures import CallError
from proxy.linking import Match, Plan
from proxy.neutral import Request

_CHARS_PER_TOKEN = 3  # a guess for messages that our template refuses; the server may well take them


async def plan(attempt: Attempt, codec: Codec, request: Request, digests: array, found: Match) -> Plan:
    """A plan whose prompt is an estimate: settle() it before it is stored."""
    try:
        prompt = await codec.render(request.messages, request.tools)
    except CallError:
        prompt = arrays.ids([0] * (sum(len(m["content"]) for m in request.messages) // _CHARS_PER_TOKEN))
    near = found.parent or found.near
    link: Link = "rewritten" if near is not None else "new_chain" if attempt.nodes else "first"
    if found.again is not None:
        near, link = found.again.parent, "sibling"
    role = found.again.role if found.again is not None else near.role if near is not None else "unknown"
    out = Plan(prompt=prompt, link=link, reason="the server renders prompts by itself", role=role, parent=near)
    if near is not None:
        out.message_shared = linking._boundary(request, digests, near)
    return out


def settle(attempt: Attempt, out: Plan, found: Match, sample: Sample) -> None:
    """Replace the estimate by the server's own ids. It continues a completion only if its tokens really do."""
    out.prompt = arrays.ids(sample.prompt or [])
    if out.parent is None:
        return
    full = attempt.full(out.parent)
    out.shared = linking.common(full, out.prompt)
    if found.parent is not None and len(out.parent.sampled) and out.shared == len(full) < len(out.prompt):
        out.link, out.reason = "continued", ""
