"""How an engine is set up."""

from __future__ import annotations

import msgspec


class Options(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of one engine; sizes are in tokens unless said otherwise."""

    served_name: str = "default"
    weight_version: str = "default"
    dtype: str = "float32"
    context_length: int | None = None  # None: the model's own
    max_running: int = 16  # sequences in one forward pass
    max_queued: int = 256  # waiting requests; beyond it: 503
    prefill_chunk: int = 512  # prompt tokens per step; bounds how long a step can hold up streams and aborts
    kv_bytes: int = 2 << 30  # key/value memory of running sequences and the prefix cache together
    prefix_entries: int = 64  # finished sequences kept for reuse
    threads: int = 0  # torch threads; 0: one for a tiny model, else torch's choice
    incremental_stream: bool = False  # chunks carry only what is new, as SGLang's --incremental-streaming-output


DTYPES = ("float32", "bfloat16")
