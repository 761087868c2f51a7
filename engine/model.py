"""A dense decoder model on the CPU: loading, checking, one packed forward pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import attention
from engine.attention import Segment, causal_mask
from engine.errors import ModelError
from engine.kv import Sequence, Shape
from engine.options import DTYPES

# Below so many parameters a second thread costs more than it brings; on a busy machine very much more.
_SMALL = 20_000_000


class Work(NamedTuple):
    """One sequence's share of a forward pass."""

    sequence: Sequence
    ids: list[int]  # its new tokens
    logits_from: int  # index into ids; len(ids) for none


class Model:
    """A loaded model.

    Attributes:
        context: most tokens of prompt and output together.
        vocab: number of logits.
        shape: what a token needs in key/value memory.
    """

    def __init__(self, folder: Path, dtype: str = "float32", context: int | None = None, threads: int = 0):
        if dtype not in DTYPES:
            raise ModelError(f"dtype {dtype!r} isn't one of {', '.join(DTYPES)}")
        config = json.loads((folder / "config.json").read_text())
        _refuse_unsupported(config)
        from transformers import AutoModelForCausalLM, modeling_utils
        from transformers.utils import logging

        logging.disable_progress_bar()
        modeling_utils.ALL_ATTENTION_FUNCTIONS.register(attention.NAME, attention.packed_attention)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=getattr(torch, dtype),
                attn_implementation=attention.NAME,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # transformers and its friends raise what they like
            raise ModelError(f"can't load the model in {folder}: {error}") from error
        net, report = loaded
        if report["missing_keys"]:  # transformers would go on with random numbers there
            raise ModelError(f"the weights in {folder} lack {', '.join(sorted(report['missing_keys'])[:3])}")
        self.net = net.eval()
        self.net.requires_grad_(False)
        self.config = self.net.config
        own = getattr(self.config, "max_position_embeddings", None) or 2048
        if context is not None and context > own:
            raise ModelError(f"context length {context} is beyond the {own} tokens this model was made for")
        self.context = context or own
        self.vocab = self.config.vocab_size
        heads = self.config.num_attention_heads
        dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // heads
        kv_heads = getattr(self.config, "num_key_value_heads", None) or heads
        self.shape = Shape(self.config.num_hidden_layers, kv_heads, dim, getattr(torch, dtype))
        if not threads and sum(weight.numel() for weight in self.net.parameters()) < _SMALL:
            threads = 1
        if threads:
            torch.set_num_threads(threads)
        self._check()

    @torch.inference_mode()
    def forward(self, work: list[Work]) -> torch.Tensor:
        """Run the new tokens of several sequences at once and extend their keys and values.

        Returns float32 logits [rows, vocab]: the wanted rows of each item, in order.
        """
        ids: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        segments: list[Segment] = []
        for sequence, new, logits_from in work:
            start, past = len(ids), sequence.length
            ids += new
            positions.extend(range(past, past + len(new)))
            rows.extend(range(start + logits_from, start + len(new)))
            segments.append(Segment(start, len(ids), sequence, past, causal_mask(past, len(new))))
        output = self.net(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            use_cache=False,
            logits_to_keep=torch.tensor(rows, dtype=torch.long),
            segments=segments,
        )
        for sequence, new, _ in work:
            sequence.length += len(new)
        return output.logits[0].float()

    def _check(self) -> None:
        """Compare the packed path with the model's own on a few tokens: a model that does anything unusual
        fails here.
        """
        ids = [(7 * index + 3) % min(self.vocab, 1000) for index in range(12)]
        try:
            first, second = (Sequence(self.shape, 16, 0) for _ in range(2))
            self.forward([Work(first, ids[:5], 5), Work(second, ids[3:9], 6)])
            packed = self.forward([Work(second, ids[9:10], 1), Work(first, ids[5:], 0)])
            self.net.set_attn_implementation("sdpa")
            with torch.inference_mode():
                plain = self.net(input_ids=torch.tensor([ids]), use_cache=False).logits[0, 5:].float()
        except (AttributeError, IndexError, TypeError, RuntimeError) as error:
            raise ModelError(f"this model ({self.config.model_type}) doesn't run in the engine: {error}") from error
        finally:
            self.net.set_attn_implementation(attention.NAME)
        off = (torch.log_softmax(packed, -1) - torch.log_softmax(plain, -1)).abs().max().item()
        # bfloat16 rounds differently per batch shape; a wrong mask or position is off by far more than this.
        if not off < (1e-3 if self.shape.dtype == torch.float32 else 0.5):
            raise ModelError(f"this model ({self.config.model_type}) computes something else here (off by {off:.3g})")


def _refuse_unsupported(config: dict) -> None:
    kind = config.get("model_type", "unknown")
    for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
        if config.get(key):
            raise ModelError(f"{kind} is a mixture-of-experts model; this engine serves dense models only")
    if config.get("quantization_config"):
        raise ModelError("quantised models aren't supported; give float weights")
    if config.get("vision_config") or config.get("is_encoder_decoder"):
        raise ModelError(f"{kind} isn't a text-only decoder")
    others = set(config.get("layer_types") or []) - {"full_attention"}
    if others or (config.get("sliding_window") and config.get("use_sliding_window", True)):
        raise ModelError(
            f"{kind} uses {', '.join(sorted(others)) or 'sliding windows'}; only full attention is supported"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (rope.get("rope_type") or rope.get("type")) in ("dynamic", "longrope"):
        raise ModelError("rotary embeddings that depend on the length of the batch aren't supported")
