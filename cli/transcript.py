"""results transcript: a session's completions beside what the agent's own transcript says of them."""

from __future__ import annotations

import typer

from cli.common import out, print_json
from cli.results_read import Config, Json, Objects, of_session
from cli.terminal import one_line
from harness_adapters import transcripts
from polar.codec import decompress, unpack
from polar.completion import Completion
from polar.errors import NotFound
from polar.objects import ObjectStore
from polar.result import SessionResult

LINE = 110  # characters of a text shown


def transcript(session: str, config: Config = None, objects: Objects = None, as_json: Json = False) -> None:
    """Each model call of a session, and where the agent's transcript speaks of it. The transcript is the agent's word."""
    store, r = of_session(config, objects, session)
    completions = captured(store, r)
    joined = transcripts.join(entries(store, r), completions)
    if as_json:
        for e in joined.entries:
            print_json(e)
        return
    for c in completions:
        said = one_line(c.response.get("content") or "")[:LINE]
        labels = one_line("".join(f" {k}={v}" for k, v in c.labels.items()))
        out.print(f"#{c.index} {c.completion_id} {c.role} {c.link} {len(c.sampled_ids)} tokens {labels}")
        out.print(f"   {said or '(no text)'}", soft_wrap=True)
        for e in joined.of(c.completion_id):
            out.print(f"   {e.kind:6} {one_line(e.file)}:{e.line}  {one_line(e.text)[:LINE]}", soft_wrap=True)
    if joined.missing:
        out.print(f"not in the transcript: {len(joined.missing)} of {len(completions)} completions")


def captured(store: ObjectStore, r: SessionResult) -> list[Completion]:
    if not r.capture_key:
        raise NotFound(f"session '{r.session_id}' has no raw capture (keep_capture)")
    return unpack(decompress(store.get(r.capture_key)), list[Completion])


def entries(store: ObjectStore, r: SessionResult) -> list[transcripts.Entry]:
    """Of the transcripts that the harness left; without any, of what the agent printed."""
    found: list[transcripts.Entry] = []
    for a in sorted(r.artifacts, key=lambda a: a.name == "agent.log"):
        if (a.name.startswith("~/") or (a.name == "agent.log" and not found)) and not a.name.endswith(
            (".db", ".db-wal")
        ):
            found += list(transcripts.read(a.name, store.get(a.key)))
    return found


def add_to(app: typer.Typer) -> None:
    app.command("transcript")(transcript)
