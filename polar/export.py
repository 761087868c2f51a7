"""Result objects for a trainer: reading, checking, and torch tensors where torch is there."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import zstandard

from polar.codec import decompress, unpack
from polar.completion import VersionSpan
from polar.errors import PolarError
from polar.objects import ObjectStore, open_objects
from polar.packed import PackedCall, PackedTree
from polar.result import SessionResult
from polar.trace import Segment, Trace, Trajectory


def read_result(objects: ObjectStore | str, key: str) -> SessionResult:
    """The result under `key`; `objects` is a store or its URL. Raises NotFound, PolarError `corrupt_result` (not whole,
    of another schema, or with arrays that don't align), or `store_unavailable` (retryable)."""
    if isinstance(objects, str):
        objects = open_objects(objects)
    try:
        data = objects.get(key)
    except OSError as e:
        raise PolarError(f"object '{key}': {e}", code="store_unavailable", retryable=True) from e
    try:
        result = unpack(decompress(data), SessionResult)
        for trace in result.trajectory.traces:
            trace.check()
        if result.trajectory.packed is not None:
            result.trajectory.packed.check()
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError, TypeError, MemoryError) as e:
        raise PolarError(f"result '{key}' can't be read: {type(e).__name__}: {e}", code="corrupt_result") from e
    return result


def rows(trajectory: Trajectory) -> list[Trace]:
    """Traces, whatever the builder: its own, or a packed tree expanded to one per completion (what `per_request` gives)."""
    tree = trajectory.packed
    return list(trajectory.traces) if tree is None else [_row(tree, c) for c in tree.calls]


def _row(tree: PackedTree, c: PackedCall) -> Trace:
    n = c.end - c.start
    return Trace(
        trace_id=c.trace_id,
        prompt_ids=tree.prompt(c),
        response_ids=tree.ids[c.start : c.end],
        loss_mask=tree.loss_mask[c.start : c.end],
        logprobs=tree.logprobs[c.start : c.end],
        segments=[
            Segment(
                completion_id=c.completion_id, start=0, end=n, finish_reason=c.finish_reason, index=c.index, role=c.role
            )
        ],
        versions=[VersionSpan(v.version, v.start - c.start, v.end - c.start) for v in c.versions],
        role=c.role,
        weight=c.weight,
        reward=c.reward,
        finish_reason=c.finish_reason,
        truncated=c.truncated,
        metadata=c.metadata,
    )


def to_torch(trace: Trace) -> dict[str, Any]:
    """Tensors of one trace, over prompt and response together, each (P + R,): `input_ids` int64; `loss_mask` bool, true
    on sampled tokens; `logprobs` float32, 0 where the mask is false. And `prompt_length` P, `weight`, `reward`."""
    import torch

    prompt = len(trace.prompt_ids)
    pad = np.zeros(prompt, dtype=np.float32)
    return {
        "input_ids": torch.from_numpy(np.concatenate([trace.prompt_ids, trace.response_ids]).astype(np.int64)),
        "loss_mask": torch.from_numpy(np.concatenate([pad, trace.loss_mask]).astype(np.bool_)),
        "logprobs": torch.from_numpy(np.concatenate([pad, trace.logprobs]).astype(np.float32)),
        "prompt_length": prompt,
        "weight": trace.weight,
        "reward": trace.reward,
    }
