"""results rebuild: the traces of a finished session by another builder, from its stored capture; nothing is run again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer
import zstandard

from cli.common import BAD, complain, deployment, out, print_json
from cli.results_read import Config, Json, Objects, of_session
from polar.codec import compress, decompress, pack, to_json, unpack
from polar.completion import Completion
from polar.errors import InvalidTask, NotFound, PolarError
from polar.objects import ObjectStore, open_objects
from polar.result import SessionResult
from polar.task import BuilderSpec
from reconstruction import registry
from reconstruction.rebuild import rebuild as rebuilt_result

T = TypeVar("T")


def rebuild(
    source: Annotated[str, typer.Argument(help="A session, or a result file (as 'polar results pull' writes it).")],
    builder: Annotated[str | None, typer.Option(help="Default: the one that built the result, as a check.")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="The builder's config; values as JSON.")
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", help="Write the new result here: .json, or .msgpack.zst as stored.")
    ] = None,
    capture: Annotated[Path | None, typer.Option(help="The capture, as a file instead of a stored object.")] = None,
    config: Config = None,
    objects: Objects = None,
    as_json: Json = False,
) -> None:
    """New traces from the stored capture of a session, by another builder. Nothing is run again.

    Without --builder, the traces are built as they were, and it is an error (exit 1) if they differ from the stored ones.
    """
    if target is not None and not target.name.endswith((".json", ".msgpack.zst")):
        raise InvalidTask(f"--out: found '{target.name}', allowed: a name that ends in .json or .msgpack.zst")
    store, stored = _stored(source, config, objects)
    known = stored.trajectory
    changes = _options(option or [])
    spec = BuilderSpec(strategy=builder or known.builder, config=changes if builder else {**known.config, **changes})
    registry.check_config(spec)
    new = rebuilt_result(stored, _completions(stored, store, capture, config, objects), spec)
    same = pack(new.trajectory) == pack(known)
    if target is not None:
        _write(target, to_json(new) + b"\n" if target.suffix == ".json" else compress(pack(new)))
    f, t = new.trajectory.fidelity, new.trajectory
    if as_json:
        print_json({"session": new.session_id, "attempt": new.attempt, "builder": t.builder, "config": t.config,
                    "same_as_stored": same, "reward": new.reward, "fidelity": f, "out": str(target) if target else None})  # fmt: skip
    else:
        out.print(
            f"{new.session_id} by {t.builder} (stored: {known.builder}), {'the same' if same else 'other'} traces"
        )
        for name in f.__struct_fields__:
            was, now = getattr(known.fidelity, name), getattr(f, name)
            out.print(f"  {name} {now}" + ("" if was == now else f"   (stored: {was})"), soft_wrap=True)
        if target is not None:
            out.print(f"  written to {target}", soft_wrap=True)
    if not same and not builder and not changes:
        complain(f"the same builder now gives other traces than are stored for {new.session_id}")
        raise typer.Exit(BAD)


def _stored(source: str, config: str | None, objects: str | None) -> tuple[ObjectStore | None, SessionResult]:
    path = Path(source)
    if path.is_file():
        return None, _decode(path, path.read_bytes(), SessionResult)
    if os.sep in source or source.endswith((".json", ".zst")):
        raise NotFound(f"no such file: {source}")
    return of_session(config, objects, source)


def _completions(
    stored: SessionResult, store: ObjectStore | None, capture: Path | None, config: str | None, objects: str | None
) -> list[Completion]:
    if capture is not None:
        if not capture.is_file():
            raise NotFound(f"no such file: {capture}")
        return _decode(capture, capture.read_bytes(), list[Completion])
    if stored.capture_key is None:
        if not stored.trajectory.fidelity.completions:
            return []
        raise NotFound(f"the result of {stored.session_id} was stored without its capture (setting keep_capture)")
    if store is None:
        store = open_objects(objects) if objects else deployment(config)[2]
    return _decode(stored.capture_key, store.get(stored.capture_key), list[Completion])


def _decode(what: object, data: bytes, typ: type[T]) -> T:
    try:
        return unpack(decompress(data), typ)
    except (zstandard.ZstdError, msgspec.MsgspecError, ValueError) as e:
        raise PolarError(f"'{what}' can't be read: {e}", code="corrupt_result") from e


def _options(pairs: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for pair in pairs:
        key, found, value = pair.partition("=")
        if not key or not found:
            raise InvalidTask(f"--set: found '{pair}', allowed: KEY=VALUE")
        try:
            config[key] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            config[key] = value  # a bare word is a text
    return config


def _write(target: Path, data: bytes) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    part.write_bytes(data)
    part.replace(target)
