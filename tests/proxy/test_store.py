"""The capture store as the proxy uses it, over a store that is late, away, or asked by several calls at once."""

from __future__ import annotations

import asyncio

import pytest

from polar import arrays
from polar.completion import Completion
from polar.store.capture import Grant, Seen
from proxy.attempt import Attempt
from proxy.failures import CallError, unavailable
from proxy.store import Store

GRANT = Grant(session_id="t.s0", attempt=1, task_id="t", model="policy")


def completion(name: str = "c-1", parent: str | None = None) -> Completion:
    return Completion(
        completion_id=name,
        session_id="t.s0",
        attempt=1,
        index=0,
        parent_id=parent,
        prompt_tail=arrays.ids([1, 2]),
        sampled_ids=arrays.ids([3]),
        logprobs=arrays.floats([-1.0]),
        messages=[{"role": "user", "content": name}],
        response={"role": "assistant", "content": "hi"},
        request_hash=name,
    )


class Capture:
    """A store whose answers wait for `open`; `entries` is its stream."""

    alone = True

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.entries: list[tuple[str, Completion]] = []
        self.ended: list[str] = []

    async def end(self, grant, completion_id, completion, seen=None) -> str:
        await self.open.wait()
        self.ended.append(completion_id)
        if completion is not None:
            self.entries.append((f"{len(self.entries) + 1}-0", completion))
            if seen is not None and len(self.entries) == seen.count + 1:
                seen.take(self.entries[-1][0])
        return "open"

    async def begin(self, grant, completion_id, seen: Seen):
        known = seen.count  # as of now: the answer takes a while
        await self.open.wait()
        return "ok", 0, [c for i, c in self.entries[known:] if seen.take(i)]

    async def note(self, *_) -> None:
        await self.open.wait()


async def test_what_is_stored_after_its_client_was_told_is_known():
    """Else the retry would not be a replay, and what other proxies build on it would have no parent."""
    capture = Capture()
    store, attempt = Store(capture, window=0.01), Attempt("t.s0.1")
    with pytest.raises(CallError, match="could not be stored"):
        await store.end(GRANT, "c-1", completion(), attempt)
    capture.open.set()
    await store.flush(5.0)
    assert capture.ended == ["c-1"] and attempt.seen.count == 1
    assert attempt.nodes["c-1"] in attempt.by_request["c-1"]
    assert attempt.add(completion("c-2", "c-1")) is not None


async def test_news_that_another_call_took_in_are_news_to_this_one():
    """Both were planned without them."""
    capture = Capture()
    capture.entries.append(("1-0", completion()))
    store, attempt = Store(capture), Attempt("t.s0.1")
    both = [asyncio.create_task(store.begin(GRANT, f"c-{n}", attempt)) for n in (2, 3)]
    await asyncio.sleep(0)
    capture.open.set()
    assert await asyncio.gather(*both) == [(0, True), (0, True)]
    assert await store.begin(GRANT, "c-4", attempt) == (0, False)


async def test_a_note_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("proxy.store.MOMENT", 0.01)
    capture = Capture()
    store = Store(capture)
    async with asyncio.timeout(5):
        await store.note(GRANT, unavailable("the engine is away"), Attempt("t.s0.1"))
    capture.open.set()
    await store.flush(5.0)


async def test_a_note_that_fails_is_no_error():
    capture = Capture()

    async def fails(*_) -> None:
        raise RuntimeError("no")

    capture.note = fails  # type: ignore[method-assign]
    await Store(capture).note(GRANT, unavailable("the engine is away"), Attempt("t.s0.1"))


@pytest.mark.parametrize("answered", [False, True])
async def test_a_note_waits_for_the_store_unless_the_agent_got_over_it(monkeypatch, answered):
    monkeypatch.setattr("proxy.store.MOMENT", 0.01)
    capture, away, noted = Capture(), True, []
    capture.open.set()

    async def note(_grant, what, message) -> None:
        if away:
            raise ConnectionError
        noted.append((what, message))

    capture.note = note  # type: ignore[method-assign]
    store, attempt = Store(capture), Attempt("t.s0.1")
    await store.note(GRANT, unavailable("the engine is away"), attempt)
    if answered:
        await store.end(GRANT, "c-1", completion(), attempt)
    away = False
    await store.flush(5.0)
    assert noted == ([] if answered else [("infra", "unavailable: the engine is away")])


async def test_put_together_sequences_count_as_memory():
    attempt, parent = Attempt("t.s0.1"), None
    for n in range(10):
        attempt.add(completion(f"c-{n}", parent))
        parent = f"c-{n}"
    held = attempt.tokens
    for node in attempt.nodes.values():
        attempt.full(node)
    assert attempt.tokens == held + sum(len(ids) for ids in attempt._full.values()) > held
