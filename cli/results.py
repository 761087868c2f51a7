"""results list, show, pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.common import deployment, out, print_json
from polar.codec import decompress, to_json, unpack
from polar.errors import NotFound
from polar.result import SessionResult

app = typer.Typer(no_args_is_help=True)
Config = Annotated[str | None, typer.Option("--config")]
Json = Annotated[bool, typer.Option("--json", help="JSON lines on stdout.")]


@app.command("list")
def list_(
    task: Annotated[str | None, typer.Argument(help="Only this task's.")] = None,
    config: Config = None,
    as_json: Json = False,
    limit: Annotated[int, typer.Option(min=1)] = 200,
) -> None:
    """The finished sessions, newest tasks first."""
    _, store, _ = deployment(config)
    n = 0
    for t in [task] if task else store.task_ids(1000):
        for s in store.task_status(t).sessions:
            if not s.result or n >= limit:
                continue
            n += 1
            if as_json:
                print_json({"session": s.session_id, "task": t, "termination": s.termination, "verdict": s.verdict,
                            "reward": s.reward, "attempt": s.attempt, "key": s.result})  # fmt: skip
            else:
                reward = "none" if s.reward is None else f"{s.reward:g}"
                out.print(f"{s.session_id}  {s.termination}  {s.verdict}  reward {reward}", soft_wrap=True)


def load(store, objects, session: str) -> SessionResult:
    s = store.session(session)
    if not s.result:
        raise NotFound(f"session '{session}' has no result yet (state {s.state})")
    return unpack(decompress(objects.get(s.result)), SessionResult)


@app.command()
def show(session: str, config: Config = None, as_json: Json = False) -> None:
    """One result: how it ended, what was judged, its traces."""
    _, store, objects = deployment(config)
    r = load(store, objects, session)
    if as_json:
        return print_json(r)
    out.print(f"{r.session_id} (attempt {r.attempt}, {r.harness} on {r.runtime}, node {r.node})")
    out.print(
        f"  termination {r.termination}   verdict {r.verdict}   reward {'none' if r.reward is None else r.reward}"
    )
    if r.error:
        out.print(f"  error {r.error.code}: {r.error.message}", soft_wrap=True)
    if r.evaluation and r.evaluation.error:
        out.print(f"  evaluation {r.evaluation.error.code}: {r.evaluation.error.message}", soft_wrap=True)
    out.print("  " + "  ".join(f"{k} {v:.2f}s" for k, v in r.timing.items()), soft_wrap=True)
    f = r.trajectory.fidelity
    out.print(f"  {f.completions} completions in {f.chains} chains, {f.sampled_tokens} tokens sampled, {f.trace_tokens} in "
              f"traces, left out {f.left_out or 'none'}", soft_wrap=True)  # fmt: skip
    for t in r.trajectory.traces:
        versions = sorted({v.version for v in t.versions})
        lengths = f"prompt {len(t.prompt_ids)}, response {len(t.response_ids)}, trained {int(t.loss_mask.sum())}"
        facts = f"reward {t.reward}, weight {t.weight:g}, versions {versions}"
        out.print(f"  trace {t.trace_id}: {lengths}, {facts}", soft_wrap=True)
    for a in r.artifacts:
        out.print(f"  artifact {a.name}: {a.size} bytes, {a.key}", soft_wrap=True)
    return None


@app.command()
def pull(
    task: str,
    target: Annotated[Path, typer.Argument(help="A folder, or a .jsonl file.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Copy the results of a task: the stored objects into a folder, or JSON lines into one file."""
    _, store, objects = deployment(config)
    keys = [(s.session_id, s.result) for s in store.task_status(task).sessions if s.result]
    if target.suffix == ".jsonl":
        tmp = target.with_suffix(".tmp")
        with tmp.open("wb") as f:
            for _, key in keys:
                f.write(to_json(unpack(decompress(objects.get(key)), SessionResult)) + b"\n")
        tmp.replace(target)
    else:
        target.mkdir(parents=True, exist_ok=True)
        for sid, key in keys:
            objects.get_file(key, target / f"{sid}.msgpack.zst")
    if as_json:
        print_json({"task": task, "results": len(keys), "target": str(target)})
    else:
        out.print(f"{len(keys)} results in {target}")
