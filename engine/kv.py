"""Key/value memory: one growing buffer per sequence, a budget over all of them, and reuse of finished ones.

A sequence's keys and values lie in one contiguous buffer, so attention reads them without gathering. Buffers
grow by a quarter, which makes a long decode linear. Finished sequences stay as an LRU prefix cache: agents
resend their whole context every turn, and the next turn takes the buffer over without copying.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import torch

_BLOCK = 64  # buffers are multiples of so many tokens


class Shape(NamedTuple):
    """What one token needs: `layers` times keys and values of [heads, dim]."""

    layers: int
    heads: int
    dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes per token, all layers, keys and values."""
        return 2 * self.layers * self.heads * self.dim * self.dtype.itemsize


class Sequence:
    """Keys and values [layers, heads, capacity, dim] of one sequence, the first `length` positions filled.

    `epoch` says which weights made the oldest of them, `ids` (int32) which tokens they stand for once it is
    cached.
    """

    def __init__(self, shape: Shape, capacity: int, epoch: int):
        self.shape = shape
        self.epoch = epoch
        self.length = 0
        self.ids = np.empty(0, dtype=np.int32)
        self.keys, self.values = self._empty(capacity), self._empty(capacity)

    @property
    def capacity(self) -> int:
        """Tokens the buffers have room for."""
        return self.keys.shape[2]

    def resize(self, capacity: int) -> None:
        """Move to larger buffers."""
        for name in ("keys", "values"):
            old, new = getattr(self, name), self._empty(capacity)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def copy_prefix(self, source: Sequence, length: int) -> None:
        """Begin with the first `length` positions of another sequence."""
        self.keys[:, :, :length] = source.keys[:, :, :length]
        self.values[:, :, :length] = source.values[:, :, :length]
        self.length = length

    def _empty(self, capacity: int) -> torch.Tensor:
        layers, heads, dim, dtype = self.shape
        return torch.empty(layers, heads, capacity, dim, dtype=dtype)


class Pool:
    """Hands out sequences within a budget of tokens, throwing out the least recently used cached ones for
    room.
    """

    def __init__(self, shape: Shape, budget: int, entries: int):
        self.shape = shape
        self.budget = budget
        self.entries = entries
        self.used = 0  # capacity of all sequences, running and cached
        self.epoch = 0
        self._cached: OrderedDict[int, Sequence] = OrderedDict()

    @property
    def cached_tokens(self) -> int:
        """Capacity held by cached sequences alone."""
        return sum(entry.capacity for entry in self._cached.values())

    def new(self, tokens: int) -> Sequence | None:
        """A sequence with room for `tokens`, or None when running sequences hold too much."""
        capacity = _round(tokens)
        if not self._make_room(capacity):
            return None
        self.used += capacity
        return Sequence(self.shape, capacity, self.epoch)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Make room for `tokens` in a sequence; False when running sequences hold too much."""
        if tokens <= sequence.capacity:
            return True
        for capacity in (_round(tokens + tokens // 4), _round(tokens)):
            more = capacity - sequence.capacity
            if self._make_room(more):
                self.used += more
                sequence.resize(capacity)
                return True
        return False

    def free(self, sequence: Sequence) -> None:
        """Give a sequence's memory back."""
        self.used -= sequence.capacity

    def keep(self, sequence: Sequence, ids: list[int]) -> None:
        """A sequence is finished: keep its `length` positions, which stand for `ids`, for reuse."""
        if sequence.epoch != self.epoch or not sequence.length or not self.entries:
            self.free(sequence)
            return
        sequence.ids = np.asarray(ids[: sequence.length], dtype=np.int32)
        for key, entry in list(self._cached.items()):
            shared = common_prefix(entry.ids, sequence.ids)
            if shared == sequence.length:  # already there
                self._cached.move_to_end(key)
                self.free(sequence)
                return
            if shared == entry.length:  # what it holds is the beginning of the new one
                self._evict(key)
        while len(self._cached) >= self.entries:
            self._evict(next(iter(self._cached)))
        self._cached[id(sequence)] = sequence

    def match(self, ids: np.ndarray) -> tuple[Sequence | None, int]:
        """The cached sequence with the longest common prefix, and that length."""
        best, length = None, 0
        for entry in self._cached.values():
            shared = common_prefix(entry.ids, ids)
            if shared > length:
                best, length = entry, shared
        if best is not None:
            self._cached.move_to_end(id(best))
        return best, length

    def take(self, sequence: Sequence, length: int) -> Sequence:
        """Take a cached sequence over, cut to `length`: no copy, but it is no longer cached."""
        del self._cached[id(sequence)]
        sequence.ids = np.empty(0, dtype=np.int32)
        sequence.length = length
        return sequence

    def clear(self) -> None:
        """Forget all cached sequences."""
        for key in list(self._cached):
            self._evict(key)

    def _evict(self, key: int) -> None:
        self.free(self._cached.pop(key))

    def _make_room(self, tokens: int) -> bool:
        while self.used + tokens > self.budget:
            if not self._cached:
                return False
            self._evict(next(iter(self._cached)))
        return True


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common beginning of two id arrays."""
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    first = int(different.argmax()) if size else 0
    return first if size and different[first] else size


def _round(tokens: int) -> int:
    return -(-tokens // _BLOCK) * _BLOCK
