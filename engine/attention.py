"""Attention over a packed batch: each sequence's new tokens against its own keys and values, with no padding.

transformers lets a model run with a registered attention function and passes unknown keyword arguments
through to it. The batch is one row of tokens, all sequences one after the other; everything but attention is
then one matrix product for all of them, and attention runs per sequence over exactly its own length, so
neither masks nor neighbours can change a result.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from engine.errors import ModelError
from engine.kv import Sequence

NAME = "polar_packed"


class Segment(NamedTuple):
    """Tokens [start, end) of the packed row continue `sequence` at its position `past`."""

    start: int
    end: int
    sequence: Sequence
    past: int
    mask: torch.Tensor | None  # bool [new, past + new]; None for one token, or for a start from nothing


def causal_mask(past: int, new: int) -> torch.Tensor | None:
    """Which keys the `new` queries after `past` may see, or None where no mask is needed."""
    if new == 1 or past == 0:
        return None
    return torch.ones(new, past + new, dtype=torch.bool).tril_(past)


def packed_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, segments=None, **other):
    """Store the new keys and values, then attend.

    query [1, heads, tokens, dim], key and value [1, kv heads, tokens, dim]; returns [1, tokens, heads, dim].
    """
    if segments is None:
        raise RuntimeError("the packed attention works only inside the engine")
    if other.get("sliding_window") or other.get("softcap") or other.get("s_aux") is not None:
        raise ModelError("this model's attention (sliding window, soft cap or sinks) isn't supported")
    heads, kv_heads = query.shape[1], key.shape[1]
    groups = heads // kv_heads
    layer = module.layer_idx
    output = torch.empty(1, query.shape[2], heads, query.shape[3], dtype=query.dtype)
    for start, end, sequence, past, mask in segments:
        new = end - start
        keys, values = sequence.keys[layer], sequence.values[layer]
        keys[:, past : past + new] = key[0, :, start:end]
        values[:, past : past + new] = value[0, :, start:end]
        keys, values = keys[None, :, : past + new], values[None, :, : past + new]
        if new == 1:
            # The heads that share a key head are rows of one query: no copy of keys, and nothing to mask.
            packed = query[:, :, start].reshape(1, kv_heads, groups, -1)
            output[:, start] = sdpa(packed, keys, values, scale=scaling).reshape(1, heads, -1)
            continue
        chunk = query[:, :, start:end]
        grouped = {"enable_gqa": True} if groups > 1 else {}
        part = sdpa(chunk, keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling, **grouped)
        output[:, start:end] = part.transpose(1, 2)
    return output, None
