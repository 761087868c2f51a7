"""submit, run, status, cancel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from cli.common import BAD, MISSING, OK, bound, complain, deployment, err, out, print_json
from cli.progress import stage_table, task_table, watch
from cli.summary import read_results, summarize
from cli.terminal import one_line
from polar.codec import load_file
from polar.errors import NotFound
from polar.store.sessions import SessionStore
from polar.task import TaskRequest
from submission import submit as submit_tasks
from submission.nudge import nudge

Files = Annotated[list[Path], typer.Argument(help="Task files: .yaml, .json, .jsonl; each one task or a list.")]
Config = Annotated[str | None, typer.Option("--config")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]
Runtime = Annotated[str | None, typer.Option(help="Run on this back-end, whatever the tasks say.")]
Samples = Annotated[
    int | None, typer.Option(min=1, max=bound("num_samples"), help="Samples per task, whatever the tasks say.")
]


def _read(files: list[Path], runtime: str | None, samples: int | None) -> list[tuple[TaskRequest, Path]]:
    read = [(task, path.parent) for path in files for task in load_file(path, TaskRequest)]
    for task, _ in read:
        if runtime:
            task.runtime = msgspec.structs.replace(task.runtime, backend=runtime)
        if samples:
            task.num_samples = samples
    return read


def _submit(files: list[Path], config: str | None, runtime: str | None, samples: int | None):
    # Wrong files are found before a deployment is looked for.
    read = _read(files, runtime, samples)
    settings, store, objects = deployment(config)
    ids = submit_tasks([t for t, _ in read], store, objects, settings, base={t.task_id: b for t, b in read})
    return store, objects, ids


def submit(
    files: Files, config: Config = None, runtime: Runtime = None, samples: Samples = None, as_json: Json = False
) -> None:
    """Enqueue tasks and return at once."""
    _, _, ids = _submit(files, config, runtime, samples)
    if as_json:
        print_json({"tasks": ids})
    else:
        for task, sessions in ids.items():
            out.print(f"{task}  {len(sessions)} sessions")


def run(
    files: Files, config: Config = None, runtime: Runtime = None, samples: Samples = None, as_json: Json = False
) -> None:
    """Submit tasks, show their progress, and print their results. Exit code 1 if a session ended in an error."""
    store, objects, ids = _submit(files, config, runtime, samples)
    try:
        watch(store, ids, err, live=err.is_terminal, check=lambda: None)
    except KeyboardInterrupt:
        err.print(f"left running: {', '.join(ids)}; 'polar cancel TASK' ends one", soft_wrap=True)
        raise
    results = read_results(store, objects, ids)
    summary = summarize(results)
    if as_json:
        print_json(msgspec.to_builtins(summary) | {"tasks": list(ids)})
    else:
        out.print(task_table(results))
        out.print(stage_table(summary))
    raise typer.Exit(BAD if summary.errors else OK)


def status(
    task: Annotated[str | None, typer.Argument(help="A task; without one, the deployment.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """State of the deployment, or of one task and its sessions."""
    _, store, _ = deployment(config)
    if task is None:
        data: dict[str, Any] = {
            "backlog": store.backlog(),
            "nodes": store.nodes(),
            "done": {k.decode(): int(v) for k, v in store.redis.hgetall(store.keys.done).items()},
            "tasks": [_brief(store, t) for t in store.task_ids(20)],
        }
        if as_json:
            return print_json(data)
        out.print("  ".join(f"{k} {v}" for k, v in data["backlog"].items()))
        for name, n in data["nodes"].items():
            out.print(f"node {name}: running {n['running']}/{n['slots']}, ready {n['ready']}/{n['ready_places']}, "
                      f"back-ends {', '.join(n['backends']) or 'none'}{', draining' if n['draining'] else ''}"
                      f"{', INIT failed ' + str(n['init_failures']) + ' times in a row' if n['init_failures'] else ''}")  # fmt: skip
        for t in data["tasks"]:
            out.print(f"{t['task_id']}  {t['done']}/{t['total']} done")
        return None
    s = store.task_status(task)
    if as_json:
        return print_json(s)
    out.print(f"{s.task_id}: {s.done}/{s.total} done, queue {s.queue}")
    for x in s.sessions:
        error = f"  {x.error.code}: {one_line(x.error.message)}" if x.error else ""
        out.print(f"  {x.session_id}  {x.state}  attempt {x.attempt}  {x.termination} {x.verdict} "
                  f"{'' if x.reward is None else x.reward}{error}", soft_wrap=True)  # fmt: skip
    return None


def _brief(store, task: str) -> dict:
    s = store.task_status(task)
    return {"task_id": task, "total": s.total, "done": s.done, "created": s.created, "queue": s.queue}


def cancel(
    ids: Annotated[list[str], typer.Argument(help="Tasks or sessions.")], config: Config = None, as_json: Json = False
) -> None:
    """Ask for the end of tasks or sessions. What was sampled so far still becomes a result. Exit code 4 if one of them
    doesn't exist; the others are ended all the same."""
    _, store, _ = deployment(config)
    cancelled: dict[str, str] = {}
    missing: list[str] = []
    for name in dict.fromkeys(ids):
        for sid in _sessions(store, name):
            try:
                cancelled[sid] = store.cancel(sid)
            except NotFound:
                missing.append(sid)
                continue
            nudge(store, [sid])  # it may wait for POSTRUN now
            if not as_json:
                out.print(f"{sid}: was {cancelled[sid]}")
    if as_json:
        print_json({"cancelled": cancelled, "missing": missing})
    for name in missing:
        complain(f"no task or session '{name}'")
    raise typer.Exit(MISSING if missing else OK)


def _sessions(store: SessionStore, name: str) -> list[str]:
    """The sessions of a task, or what may be one itself."""
    try:
        return [s.session_id for s in store.task_status(name).sessions]
    except NotFound:
        return [name]
