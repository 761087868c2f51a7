"""The same request again: is it after the answer that it had, or after another?

CLIs don't mark their retries, so delivery decides. While the answer is generated, the same request joins it: one sample.
After that it gets the answer once more if no client had it whole, else a new sample, the sibling. Streams and whole answers
are the same request.

Two requests that are equal on purpose and run at once (subagents with one prompt) can't be told from a retry, since what
harnesses say of themselves decides nothing here: both get the same sample, counted once. It is exact, if less diverse, and
what they do next forks into chains of its own. Two proxies don't join each other's: each draws a sample, both count, and
the later one is the sibling.
"""

from __future__ import annotations

import contextlib

from proxy.attempt import Attempt, Node
from proxy.failures import CallError
from proxy.linking import Plan
from proxy.neutral import Request
from proxy.store import Store


async def wants_again(store: Store, attempt: Attempt, request: Request, request_hash: str, node: Node) -> bool:
    """Whether a request is after `node`, the latest answer to it. Raises CallError if the store can't be asked."""
    if not node.whole:
        return False
    if not node.certain or not (node.delivered or store.alone):  # another proxy may have delivered it
        node.delivered = not await store.undelivered(attempt.id, node.id)
        node.certain = True
    # A retry that an SDK marks says that the answer got lost, though we thought it delivered; unless what it repeats is a
    # call that failed here after that answer.
    return not node.delivered or (request.marked_retry and request_hash not in attempt.failed)


async def settle(store: Store, attempt: Attempt, request_hash: str, plan: Plan) -> None:
    """Before a sample is stored: it is a sibling if the same request was answered in the meantime, by another proxy (its
    client was sent to this one for the retry) or by a generation that took long to abort."""
    if plan.link == "sibling":
        return
    if not store.alone:
        with contextlib.suppress(CallError):  # what was sampled is stored in any case
            await store.sync(attempt)
    if attempt.by_request.get(request_hash):
        plan.link, plan.reason = "sibling", "the same request was answered in the meantime"
