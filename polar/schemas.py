"""`python -m polar.schemas [--check] FOLDER`: JSON Schemas of the public contracts, one file each.

They describe the JSON forms (arrays as lists of numbers). What a schema can't say, such as "exactly one of two fields",
is checked when a task is read.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polar.completion import Completion
from polar.config import Settings
from polar.result import LedgerLine, SessionResult
from polar.task import TaskRequest
from polar.trace import Trajectory

CONTRACTS: tuple[type, ...] = (TaskRequest, SessionResult, Trajectory, Completion, LedgerLine, Settings)


def schema(typ: type) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one contract."""
    (root,), parts = msgspec.json.schema_components([typ], schema_hook=_hook, ref_template="#/$defs/{name}")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": typ.__name__,
        **root,
        "$defs": dict(sorted(parts.items())),
    }


def files() -> dict[str, bytes]:
    """File name -> contents, for every contract."""
    return {
        f"{re.sub(r'(?<!^)(?=[A-Z])', '_', t.__name__).lower()}.schema.json": msgspec.json.format(
            msgspec.json.encode(schema(t)), indent=2
        )
        + b"\n"
        for t in CONTRACTS
    }


def _hook(typ: Any) -> dict[str, Any]:
    if typ is np.ndarray:
        return {"type": "array", "items": {"type": "number"}}
    raise NotImplementedError(typ)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m polar.schemas", description=__doc__)
    p.add_argument("folder", type=Path)
    p.add_argument("--check", action="store_true", help="write nothing; exit 1 if a file is missing or old")
    args = p.parse_args(argv)
    made = files()
    old = [n for n, data in made.items() if not (f := args.folder / n).is_file() or f.read_bytes() != data]
    strange = sorted({f.name for f in args.folder.glob("*.schema.json")} - set(made))
    if args.check:
        for name in old + strange:
            print(f"{args.folder / name}: {'differs from' if name in made else 'is not part of'} the contracts")
        return 1 if old or strange else 0
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in old:
        (args.folder / name).write_bytes(made[name])
    for name in strange:
        (args.folder / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
