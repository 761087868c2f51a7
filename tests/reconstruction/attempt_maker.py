"""Captured attempts for the tests: written by hand in a line, or drawn at random by hypothesis."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from polar.arrays import floats, ids
from polar.completion import Completion, VersionSpan, resolve_prompts

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


_TOKENS = st.lists(st.integers(1, 3) | st.just(EOT), max_size=4)
_KINDS = st.sampled_from(
    [
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
    ]
)
_FINISH = st.sampled_from(["stop", "stop", "stop", "tool_calls", "length", "abort"])


@st.composite
def attempts(draw: Any, max_size: int = 12) -> list[Completion]:
    """Random conversation trees over a tiny alphabet (so that accidental prefixes are common), in order of arrival."""
    out: list[Completion] = []
    for index in range(draw(st.integers(0, max_size))):
        sampled = draw(_TOKENS) + ([EOT] if draw(st.booleans()) else [])
        kw: dict[str, Any] = {
            "finish_reason": draw(_FINISH),
            "role": draw(st.sampled_from(["main", "main", "subagent"])),
            "delivered": draw(st.booleans()),
        }
        fault = draw(st.integers(0, 11))
        if fault == 0:
            kw.update(untrainable="logprobs missing", logprobs=floats([]))
        elif fault == 1:
            kw.update(logprobs=floats([-1.0] * (len(sampled) + 1)))
        cut = draw(st.integers(0, len(sampled)))
        kw["versions"] = [
            s for s in (VersionSpan("v1", 0, cut), VersionSpan("v2", cut, len(sampled))) if s.end > s.start
        ]
        kind = draw(_KINDS)
        tail = draw(_TOKENS)
        if not out or kind == "fresh":
            out.append(completion(index, tail, sampled, **kw))
            continue
        parent = out[draw(st.integers(0, len(out) - 1))] if draw(st.booleans()) else out[-1]
        prompt = resolve_prompts(out)[parent.completion_id].tolist()
        raw = parent.sampled_ids.tolist()
        if kind == "continued":
            c = continued(index, parent, tail, sampled, **kw)
        elif kind == "literal":
            c = completion(index, prompt + raw + tail, sampled, **kw)
        elif kind == "drift":
            c = completion(index, prompt + draw(_TOKENS) + [EOT, *tail], sampled, **kw)
        elif kind == "retry":
            c = completion(index, prompt, sampled, **kw)
        elif kind == "linked_retry":
            shared = parent.prompt_length
            c = continued(index, parent, [], sampled, prompt_shared=shared, link="sibling", **kw)
        elif kind == "sibling":  # as the proxy stores one: the same reference as its twin's
            twin = {"parent_id": parent.parent_id, "prompt_shared": parent.prompt_shared, "link": "sibling"}
            c = completion(index, parent.prompt_tail.tolist(), sampled, **twin, **kw)
        elif kind == "bridged":  # linked, though the renderer kept only a part of the raw sample
            shared = draw(st.integers(parent.prompt_length, parent.prompt_length + len(raw)))
            c = continued(index, parent, tail, sampled, prompt_shared=shared, **kw)
        elif kind == "rewritten":
            shared = draw(st.integers(0, parent.prompt_length + len(raw)))
            c = continued(index, parent, tail, sampled, prompt_shared=shared, link="rewritten", **kw)
        elif kind == "extend":
            c = completion(index, prompt + tail, sampled, **kw)
        else:
            c = completion(index, prompt[: len(prompt) // 2] + tail, sampled, **kw)
        out.append(c)
    return out
