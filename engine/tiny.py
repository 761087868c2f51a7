"""A two-layer Llama with fixed random weights: loads in no time, means nothing, exercises everything.

It imports numpy only. The scales are chosen so that its distributions have some shape (a flat one would hide
errors in log-probabilities) and its greedy choice is clear.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 128, 2
CONTEXT = 32_768


def write_model(target: Path, seed: int = 20_261_129) -> None:
    """Write config.json, generation_config.json and model.safetensors (12.6 MB, float32) beside the tokenizer
    in `target`.
    """
    from safetensors.numpy import save_file

    path = target / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "model_max_length": CONTEXT}
    path.write_text(json.dumps(settings, indent=2) + "\n")
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    vocab = 1 + max(*tokenizer["model"]["vocab"].values(), *ids.values())
    save_file(
        _weights(vocab, np.random.default_rng(seed)),
        str(target / "model.safetensors"),
        metadata={"format": "pt"},
    )
    special = {
        "bos_token_id": ids["<|im_start|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|im_end|>"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rope_theta": 100_000,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        **special,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (target / "generation_config.json").write_text(json.dumps(special, indent=2) + "\n")


def _weights(vocab: int, random: np.random.Generator) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (random.standard_normal((rows, columns), dtype=np.float32) * np.float32(scale)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN, 0.4),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        block = f"model.layers.{layer}"
        shapes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for part, (rows, columns) in shapes.items():
            weights[f"{block}.{part}.weight"] = matrix(rows, columns, 1.2 / columns**0.5)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{block}.{part}.weight"] = np.ones(HIDDEN, np.float32)
    return weights
