"""Captured attempts for the tests: written by hand in a line, or drawn at random by hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from polar.arrays import floats, ids
from polar.completion import Completion, VersionSpan

EOT = 9


def completion(index: int, prompt: list[int], sampled: list[int], **kw: Any) -> Completion:
    """A completion whose prompt stands in full in `prompt_tail`. Logprobs are distinct and negative."""
    kw.setdefault("completion_id", f"c{index}")
    kw.setdefault("logprobs", floats([-(index + 1) - n / 100 for n in range(len(sampled))]))
    return Completion(
        session_id="t.s0", attempt=1, index=index, prompt_tail=ids(prompt), sampled_ids=ids(sampled), **kw
    )  # fmt: skip


def continued(index: int, parent: Completion, tail: list[int], sampled: list[int], **kw: Any) -> Completion:
    """As the proxy records it: parent's prompt + parent's raw sample + `tail`."""
    kw.setdefault("prompt_shared", parent.prompt_length + len(parent.sampled_ids))
    kw.setdefault("link", "continued")
    return completion(index, tail, sampled, parent_id=parent.completion_id, **kw)


def session(turns: int, prompt: int, sampled: int, tool: int) -> list[Completion]:
    """An append-only session of `turns` calls, linked; sizes in tokens."""
    rng = np.random.default_rng(turns)
    out: list[Completion] = []
    for n in range(turns):
        ids_ = [*rng.integers(10, 1000, sampled - 1).tolist(), EOT]
        tail = rng.integers(10, 1000, tool if out else prompt).tolist()
        out.append(continued(n, out[-1], tail, ids_) if out else completion(0, tail, ids_))
    return out


KINDS = (
    "continued",
    "literal",
    "drift",
    "retry",
    "linked_retry",
    "sibling",
    "bridged",
    "rewritten",
    "fresh",
    "extend",
    "strip",
)
Pick = Callable[[int], int]  # a number in 0..n-1


def random_attempt(pick: Pick, max_size: int = 12) -> list[Completion]:
    """A conversation tree over a tiny alphabet (so that accidental prefixes are common), in order of arrival."""
    out: list[Completion] = []
    prompts: dict[str, list[int]] = {}
    for index in range(pick(max_size + 1)):
        c = _random_completion(pick, index, out, prompts)
        base = out[[o.completion_id for o in out].index(c.parent_id)] if c.parent_id else None
        context = prompts[base.completion_id] + base.sampled_ids.tolist() if base else []
        prompts[c.completion_id] = context[: c.prompt_shared] + c.prompt_tail.tolist()
        out.append(c)
    return out


def _tokens(pick: Pick) -> list[int]:
    return [(1, 2, 3, EOT)[pick(4)] for _ in range(pick(5))]


def _random_completion(pick: Pick, index: int, out: list[Completion], prompts: dict[str, list[int]]) -> Completion:
    sampled = _tokens(pick) + [EOT] * pick(2)
    kw: dict[str, Any] = {
        "finish_reason": ("stop", "stop", "stop", "tool_calls", "length", "abort")[pick(6)],
        "role": ("main", "main", "subagent", "unknown")[pick(4)],
        "delivered": bool(pick(2)),
        "stop_matched": (None, None, EOT, "END")[pick(4)],
    }
    fault = pick(12)
    if fault == 0:
        kw.update(untrainable="logprobs missing", logprobs=floats([]))
    elif fault == 1:
        kw.update(logprobs=floats([-1.0] * (len(sampled) + 1)))
    cut = pick(len(sampled) + 1)
    kw["versions"] = [s for s in (VersionSpan("v1", 0, cut), VersionSpan("v2", cut, len(sampled))) if s.end > s.start]
    kind, tail = KINDS[pick(len(KINDS))], _tokens(pick)
    if not out or kind == "fresh":
        return completion(index, tail, sampled, **kw)
    parent = out[pick(len(out))] if pick(2) else out[-1]
    prompt, raw = prompts[parent.completion_id], parent.sampled_ids.tolist()
    if kind == "continued":
        return continued(index, parent, tail, sampled, **kw)
    if kind == "literal":
        return completion(index, prompt + raw + tail, sampled, **kw)
    if kind == "drift":
        return completion(index, prompt + _tokens(pick) + [EOT, *tail], sampled, **kw)
    if kind == "retry":
        return completion(index, prompt, sampled, **kw)
    if kind == "linked_retry":
        return continued(index, parent, [], sampled, prompt_shared=len(prompt), link="sibling", **kw)
    if kind == "sibling":  # as the proxy stores one: the same reference as its twin's
        twin = {"parent_id": parent.parent_id, "prompt_shared": parent.prompt_shared, "link": "sibling"}
        return completion(index, parent.prompt_tail.tolist(), sampled, **twin, **kw)
    if kind == "bridged":  # linked, though the renderer kept only a part of the raw sample
        return continued(index, parent, tail, sampled, prompt_shared=len(prompt) + pick(len(raw) + 1), **kw)
    if kind == "rewritten":
        shared = pick(len(prompt) + len(raw) + 1)
        return continued(index, parent, tail, sampled, prompt_shared=shared, link="rewritten", **kw)
    if kind == "extend":
        return completion(index, prompt + tail, sampled, **kw)
    return completion(index, prompt[: len(prompt) // 2] + tail, sampled, **kw)


@st.composite
def attempts(draw: Any, max_size: int = 12) -> list[Completion]:
    """Random attempts that hypothesis can shrink."""
    return random_attempt(lambda n: draw(st.integers(0, n - 1)), max_size)


def seeded_attempt(seed: int) -> list[Completion]:
    """The same, from a seed: a thousand times faster, for the long run."""
    return random_attempt(random.Random(seed).randrange)


def without_order(completions: list[Completion], shuffle: Callable[[list[Completion]], None]) -> list[Completion]:
    """The capture of a recorder that knows neither order nor time: equal indices, in any order."""
    out = [replace(c, index=0, started_at=1.0, finished_at=1.0) for c in completions]
    shuffle(out)
    return out
