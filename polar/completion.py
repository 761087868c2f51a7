"""One model API call inside an attempt, as captured at the proxy."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from msgspec import Struct, field

from polar.errors import PolarError

SCHEMA: Final = 1

Role = Literal["main", "subagent", "auxiliary", "compaction", "unknown"]
# How a prompt was linked: `continued` = parent's prompt + raw sampled ids + newly rendered tail.
Link = Literal["first", "continued", "rewritten", "new_chain", "sibling"]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


class VersionSpan(Struct, array_like=True, frozen=True):
    """Tokens [start, end) of a sampled sequence came from policy version `version`."""

    version: str
    start: int
    end: int


class Completion(Struct, kw_only=True, eq=False, omit_defaults=True):
    """As stored in the capture stream. The prompt is delta-encoded: its ids are the first `prompt_shared` ids of
    (parent's prompt + parent's sampled ids), followed by `prompt_tail`. Without a parent, `prompt_shared` is 0.

    prompt_tail, sampled_ids: int32 (n,). logprobs: float32 (n,), natural log, or empty when `untrainable` says why.
    Times are Unix seconds on the proxy's clock. `messages` are the request's messages from `message_shared` on.
    """

    completion_id: str
    session_id: str
    attempt: int
    index: int  # order of arrival within the attempt, from 0
    parent_id: str | None = None
    link: Link = "first"
    link_reason: str = ""
    prompt_shared: int = 0
    prompt_tail: np.ndarray
    sampled_ids: np.ndarray
    logprobs: np.ndarray
    versions: list[VersionSpan] = field(default_factory=list)
    untrainable: str = ""  # empty: trainable; else the reason
    finish_reason: FinishReason = "stop"
    stop_matched: int | str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # really used
    requested_sampling: dict[str, Any] = field(default_factory=dict)  # what the harness asked for
    model: str = ""
    engine: str = ""
    dialect: str = ""
    stream: bool = False
    role: Role = "unknown"
    request_hash: str = ""
    labels: dict[str, str] = field(default_factory=dict)  # what the harness says of itself: session, thread, agent ids
    delivered: bool = True  # false: known not to have reached its client whole
    message_shared: int = 0
    messages: list[Any] = field(default_factory=list)
    tools_hash: str = ""
    tools: list[Any] = field(default_factory=list)  # empty when equal to the parent's
    response: dict[str, Any] = field(default_factory=dict)
    cached_tokens: int = 0
    started_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    schema_version: Literal[1] = SCHEMA

    @property
    def prompt_length(self) -> int:
        return self.prompt_shared + len(self.prompt_tail)


def resolve_prompts(completions: list[Completion]) -> dict[str, np.ndarray]:
    """Full prompt ids (int32) by completion id: the reference reading of the delta encoding (it copies whole prompts; the
    builders don't use it). Only for link `continued` is `parent_id` a logical parent; else it only says whose ids are
    shared. A parent must come before its child, as it does in the stream.

    Raises PolarError (`corrupt_capture`) when a parent is missing or too short: a prompt is never guessed.
    """
    full: dict[str, np.ndarray] = {}  # prompt + sampled
    prompts: dict[str, np.ndarray] = {}
    for c in completions:
        if c.parent_id is None or c.prompt_shared == 0:
            prompt = c.prompt_tail
        else:
            base = full.get(c.parent_id)
            if base is None or len(base) < c.prompt_shared:
                raise PolarError(
                    f"completion {c.completion_id}: parent {c.parent_id} is missing", code="corrupt_capture"
                )
            prompt = np.concatenate([base[: c.prompt_shared], c.prompt_tail])
        prompts[c.completion_id] = prompt
        full[c.completion_id] = np.concatenate([prompt, c.sampled_ids])
    return prompts
