"""results list, show, pull, rebuild: from a running deployment, or (`--objects`) from the stored objects alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.common import out, print_json
from cli.results_read import Config, Json, Objects, find, of_session, read
from cli.results_rebuild import rebuild
from cli.terminal import one_line
from polar.codec import to_json
from polar.errors import NotFound

app = typer.Typer(no_args_is_help=True)
app.command()(rebuild)


@app.command("list")
def list_(
    task: Annotated[str | None, typer.Argument(help="Only this task's.")] = None,
    config: Config = None,
    objects: Objects = None,
    as_json: Json = False,
    limit: Annotated[int, typer.Option(min=1)] = 200,
) -> None:
    """The finished sessions, newest tasks first."""
    from_store, keys = find(config, objects, task)
    for _, key in zip(range(limit), keys, strict=False):
        r = read(from_store, key)
        if as_json:
            print_json({"session": r.session_id, "task": r.task_id, "termination": r.termination, "verdict": r.verdict,
                        "reward": r.reward, "attempt": r.attempt, "key": key})  # fmt: skip
        else:
            reward = "none" if r.reward is None else f"{r.reward:g}"
            out.print(f"{r.session_id}  {r.termination}  {r.verdict}  reward {reward}", soft_wrap=True)


@app.command()
def show(session: str, config: Config = None, objects: Objects = None, as_json: Json = False) -> None:
    """One result: how it ended, what was judged, its traces."""
    _, r = of_session(config, objects, session)
    if as_json:
        return print_json(r)
    out.print(f"{r.session_id} (attempt {r.attempt}, {r.harness} on {r.runtime}, node {r.node})")
    out.print(
        f"  termination {r.termination}   verdict {r.verdict}   reward {'none' if r.reward is None else r.reward}"
    )
    if r.error:
        out.print(f"  error {r.error.code}: {one_line(r.error.message)}", soft_wrap=True)
    if r.evaluation and r.evaluation.error:
        out.print(f"  evaluation {r.evaluation.error.code}: {one_line(r.evaluation.error.message)}", soft_wrap=True)
    out.print("  " + "  ".join(f"{k} {v:.2f}s" for k, v in r.timing.items()), soft_wrap=True)
    f = r.trajectory.fidelity
    out.print(f"  {f.completions} completions in {f.chains} chains, {f.sampled_tokens} tokens sampled, {f.trace_tokens} in "
              f"traces, left out {f.left_out or 'none'}", soft_wrap=True)  # fmt: skip
    if r.trajectory.packed is not None:
        out.print(f"  packed tree: {len(r.trajectory.packed.ids)} tokens, {len(r.trajectory.packed.calls)} calls")
    for t in r.trajectory.traces:
        versions = sorted({v.version for v in t.versions})
        lengths = f"prompt {len(t.prompt_ids)}, response {len(t.response_ids)}, trained {int(t.loss_mask.sum())}"
        facts = f"reward {t.reward}, weight {t.weight:g}, versions {versions}"
        out.print(f"  trace {t.trace_id}: {lengths}, {facts}", soft_wrap=True)
    for a in r.artifacts:
        out.print(f"  artifact {one_line(a.name)}: {a.size} bytes, {one_line(a.key)}", soft_wrap=True)
    return None


@app.command()
def pull(
    task: str,
    target: Annotated[Path, typer.Argument(help="A folder, or a .jsonl file.")],
    config: Config = None,
    objects: Objects = None,
    as_json: Json = False,
) -> None:
    """Copy the results of a task: the stored objects into a folder, or JSON lines into one file."""
    from_store, found = find(config, objects, task)
    keys = list(found)
    if not keys:
        raise NotFound(f"task '{task}' has no results")
    if target.suffix == ".jsonl":
        tmp = target.with_suffix(".tmp")
        with tmp.open("wb") as f:
            for key in keys:
                f.write(to_json(read(from_store, key)) + b"\n")
        tmp.replace(target)
    else:
        target.mkdir(parents=True, exist_ok=True)
        for key in keys:
            _, _, session, attempt = key.split("/")
            from_store.get_file(key, target / f"{session}.{attempt}")
    if as_json:
        print_json({"task": task, "results": len(keys), "target": str(target)})
    else:
        out.print(f"{len(keys)} results in {target}")
