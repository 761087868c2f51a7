"""Where the `results` commands read: a running deployment, or (`--objects`) the stored objects alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from cli.common import deployment
from polar.codec import decompress, unpack
from polar.errors import NotFound
from polar.objects import ObjectStore, open_objects
from polar.result import SessionResult

Config = Annotated[str | None, typer.Option("--config")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]
Objects = Annotated[
    str | None, typer.Option("--objects", help="Read this object store (file:///…, s3://…) without a deployment.")
]


def find(config: str | None, objects_url: str | None, task: str | None) -> tuple[ObjectStore, Iterator[str]]:
    """The object store, and the result keys of one task or of all: committed ones, or with `--objects` what lies there."""
    if objects_url:
        objects = open_objects(objects_url)
        return objects, objects.list(f"results/{task}/" if task else "results/")
    _, store, objects = deployment(config)
    tasks = [task] if task else store.task_ids(1000)
    return objects, (s.result for t in tasks for s in store.task_status(t).sessions if s.result)


def read(objects: ObjectStore, key: str) -> SessionResult:
    return unpack(decompress(objects.get(key)), SessionResult)


def of_session(config: str | None, objects_url: str | None, session: str) -> tuple[ObjectStore, SessionResult]:
    if objects_url:
        objects, keys = find(config, objects_url, session.rpartition(".")[0])
        mine = [k for k in keys if k.split("/")[2] == session]
        if not mine:
            raise NotFound(f"no result of session '{session}' in {objects_url}")
        return objects, read(objects, mine[-1])
    _, store, objects = deployment(config)
    s = store.session(session)
    if not s.result:
        raise NotFound(f"session '{session}' has no result yet (state {s.state})")
    return objects, read(objects, s.result)
