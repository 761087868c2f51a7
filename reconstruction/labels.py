"""What a trace says about where it comes from, beside its arrays."""

from __future__ import annotations

from reconstruction.tree import Call


def metadata(first: Call, split: str = "") -> dict[str, object]:
    """`split`: why the trace doesn't go on with the one before it in its chain. `retry_of`: the completion that the
    agent went on with instead of this one."""
    out: dict[str, object] = {}
    if split:
        out["split"] = split
    if first.retry_of is not None:
        out["retry_of"] = first.retry_of.completion.completion_id
    return out
