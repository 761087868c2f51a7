"""Rows of a data set, from JSON lines or Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polar.errors import InvalidTask

Row = dict[str, Any]


def read(path: Path) -> Iterator[Row]:
    """Raises InvalidTask naming file and line."""
    if not path.is_file():
        raise InvalidTask(f"{path}: no such file")
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix in (".jsonl", ".json", ".ndjson"):
        yield from _json(path)
    else:
        raise InvalidTask(f"{path}: unknown file type '{path.suffix}'; allowed: .jsonl, .json, .parquet")


def _json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json" and text.lstrip().startswith("["):
        lines = [(f"{path}[{n}]", item) for n, item in enumerate(_load(text, str(path)))]
    else:
        lines = [
            (f"{path}:{n}", _load(line, f"{path}:{n}")) for n, line in enumerate(text.split("\n"), 1) if line.strip()
        ]
    for where, row in lines:
        if not isinstance(row, dict):
            raise InvalidTask(f"{where}: an object is needed, found {type(row).__name__}")
        yield row


def _load(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as e:
        raise InvalidTask(f"{where}: not valid JSON: {e}") from e


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InvalidTask(f"{path}: reading Parquet needs pyarrow (pip install 'polar-rollout[swe]')") from None
    try:
        file = parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=64):
            yield from batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as e:
        raise InvalidTask(f"{path}: not a Parquet file: {' '.join(str(e).split())[:200]}") from e


def text(row: Row, key: str, where: str, default: str | None = None) -> str:
    value = row.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise InvalidTask(
            f"{where}: {key}: a text is needed, found {'nothing' if value is None else type(value).__name__}"
        )
    return value


def texts(row: Row, key: str, where: str) -> list[str]:
    """A list of texts, or JSON of one, as data sets have it."""
    value = row.get(key)
    if isinstance(value, str):
        value = _load(value, f"{where}: {key}") if value.lstrip().startswith("[") else [value] if value else []
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InvalidTask(f"{where}: {key}: a list of texts is needed")
    return list(dict.fromkeys(value))
