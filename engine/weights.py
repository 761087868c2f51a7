"""Replacing a model's weights: read and validate everything first, then copy in place."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from engine.errors import ModelError

Weights = dict[str, torch.Tensor]

# What changes a model's function without changing the shape of any weight.
_SAME = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "hidden_act",
    "tie_word_embeddings",
)


def read_weights(folder: Path, net: torch.nn.Module) -> Weights:
    """Read a folder's safetensors for `net` and check names, shapes and numbers. Raises ModelError; changes
    nothing.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ModelError(f"{folder} isn't a folder")
    _check_config(folder, net)
    own = net.state_dict()
    weights: Weights = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    weights[name] = tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"can't read {file.name} in {folder}: {error}") from error
    for name in _tied(net):
        weights.pop(name, None)
        own.pop(name, None)
    missing, unknown = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unknown:
        raise ModelError(
            f"the weights in {folder} don't fit the model:"
            + (f" missing {', '.join(missing[:3])} (of {len(missing)})" if missing else "")
            + (f" unknown {', '.join(unknown[:3])} (of {len(unknown)})" if unknown else "")
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise ModelError(f"{name} in {folder} is {tuple(value.shape)}; the model's is {tuple(own[name].shape)}")
        if not value.is_floating_point():
            raise ModelError(f"{name} in {folder} has the type {value.dtype}; only float weights are supported")
        # A copy, since the tensor may be a view of the file: what is checked must be what is used.
        converted = value.to(own[name].dtype, copy=True)
        if not torch.isfinite(converted).all():
            raise ModelError(f"{name} in {folder} has values that aren't finite numbers")
        weights[name] = converted
    return weights


@torch.no_grad()
def copy_weights(weights: Weights, net: torch.nn.Module) -> None:
    """Copy validated weights into the model's own tensors (tied ones stay tied)."""
    own = net.state_dict()
    for name, value in weights.items():
        own[name].copy_(value)


def _files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"can't read {index}: {error}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} has no .safetensors file")
    return files


def _check_config(folder: Path, net: torch.nn.Module) -> None:
    path = folder / "config.json"
    if not path.is_file():
        return  # weights alone: their names and shapes must do
    try:
        given = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"can't read {path}: {error}") from error
    for key in _SAME:
        if key in given and given[key] != getattr(net.config, key, given[key]):
            raise ModelError(f"{path} has {key} {given[key]!r}; the model's is {getattr(net.config, key)!r}")


def _tied(net: torch.nn.Module) -> list[str]:
    """Names that are another name's tensor."""
    if not getattr(net.config, "tie_word_embeddings", False):
        return []
    return [name for name in net.state_dict() if name.endswith("lm_head.weight")]
