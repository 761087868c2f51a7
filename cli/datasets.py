"""`polar tasks import`: data sets to task files, and whether each instance tells right from wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from cli import dataset_harbor, dataset_rows, dataset_swe
from cli.common import BAD, OK, err, out, print_json, settings
from cli.dataset_check import check as run_check
from cli.dataset_swe import Instance, Rules
from polar.codec import convert, to_json
from polar.errors import InvalidTask
from polar.ids import is_id
from polar.task import TaskRequest
from submission.validate import validate

app = typer.Typer(no_args_is_help=True)


class Format(StrEnum):
    swebench = "swebench"
    swegym = "swegym"
    swesmith = "swesmith"
    harbor = "harbor"


@app.callback()
def tasks() -> None:
    """Task files from data sets."""


@app.command("import")
def import_tasks(
    source: Annotated[Path, typer.Argument(help="A .jsonl, .json or .parquet file, or a folder of Harbor tasks.")],
    to: Annotated[Path, typer.Option("--out", help="Folder for one task file per instance; patches go to its gold/.")],
    form: Annotated[Format, typer.Option("--format", help="What the source holds.")] = Format.swebench,
    image: Annotated[
        str, typer.Option("--image-template", help="Image of an instance, such as 'my/{instance_id}:1'.")
    ] = "",
    template: Annotated[
        Path | None, typer.Option(help="A task file (.yaml, .json) that every task is laid over.")
    ] = None,
    repo: Annotated[str, typer.Option(help="The repository's folder in the images.")] = "/testbed",
    command: Annotated[str, typer.Option("--test-command", help="For every instance; may hold {test_files}.")] = "",
    parser: Annotated[str, typer.Option("--log-parser", help="'pytest', or a parser of the swebench package.")] = "",
    backend: Annotated[str, typer.Option("--runtime", help="Back-end of the tasks' sandboxes.")] = "",
    only: Annotated[list[str] | None, typer.Option(help="Instances to take (repeatable).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run each solution (must pass) and no change at all (must fail).")
    ] = False,
    config: Annotated[str | None, typer.Option("--config", help="Settings file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")] = False,
) -> None:
    """Turn a data set into task files. Exit code 1 if `--check` finds an instance that doesn't tell right from wrong."""
    base = _template(template)
    rules = Rules(form.value, image=image, repo=repo, command=command, parser=parser)
    chosen = _chosen(_instances(source, form, rules), only or [], limit)
    s = settings(config)
    made: list[tuple[Instance, TaskRequest]] = []
    for instance in chosen:
        data = _task(base, instance)
        if backend:
            for spec in (data["runtime"], data["evaluator"].get("runtime")):
                if spec is not None:
                    spec["backend"] = backend
                    if backend == "local":  # it has no images
                        spec.pop("image", None)
        data.setdefault("task_id", _task_id(instance.name))
        task = convert(data, TaskRequest, instance.name)
        validate(task, s)
        made.append((instance, task))
    if not made:
        raise InvalidTask(f"{source}: no instance was chosen")
    _write(to, made)
    checks = [_checked(i, t, s, as_json) for i, t in made] if check else []
    bad = [c for c in checks if not c.good]
    if as_json:
        rows = [
            {"instance": c.name, "good": c.good, "gold": c.gold, "empty": c.empty, "message": c.message} for c in checks
        ]
        print_json({"tasks": [t.task_id for _, t in made], "out": str(to), "checks": rows})
    else:
        if checks:
            out.print(_table(checks))
        notes = [f"{i.name}: {n}" for i, _ in made for n in i.notes]
        for note in notes[:20]:
            err.print(f"note: {note}")
        out.print(f"{len(made)} tasks in {to}" + (f", {len(bad)} of {len(checks)} don't hold" if bad else ""))
    raise typer.Exit(BAD if bad else OK)


def _instances(source: Path, form: Format, rules: Rules) -> Iterator[Instance]:
    if form is Format.harbor:
        for folder in dataset_harbor.folders(source):
            yield dataset_harbor.convert(folder, rules.image)
        return
    for n, row in enumerate(dataset_rows.read(source), 1):
        yield dataset_swe.convert(row, rules, f"{source}: instance {row.get('instance_id', n)}")


def _chosen(instances: Iterator[Instance], only: list[str], limit: int | None) -> list[Instance]:
    found: dict[str, Instance] = {}
    for instance in instances:
        if only and instance.name not in only:
            continue
        if instance.name in found:
            raise InvalidTask(f"instance '{instance.name}' is there twice")
        found[instance.name] = instance
        if len(found) == limit:
            break
    if missing := sorted(set(only) - found.keys()) if limit is None else []:
        raise InvalidTask(f"--only: no instance '{missing[0]}'")
    return list(found.values())


def _template(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {"agent": {"harness": "mini_swe_agent"}}
    if not path.is_file():
        raise InvalidTask(f"{path}: no such file")
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as e:
        raise InvalidTask(f"{path}: not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(data, dict):
        raise InvalidTask(f"{path}: a task without its instance's parts is needed")
    if "task_id" in data:
        raise InvalidTask(f"{path}: task_id: each task has its own")
    return data


def _task(base: dict[str, Any], instance: Instance) -> dict[str, Any]:
    """The instance over the template. Its judge's sandbox is the template's, too, with the template's steps first."""
    data = _merged(base, instance.task)
    # How long judging may take depends on the user's machines more than on the data set.
    if "evaluation_timeout_seconds" in base:
        data["evaluation_timeout_seconds"] = base["evaluation_timeout_seconds"]
    limit = ((base.get("evaluator") or {}).get("config") or {}).get("timeout_seconds")
    if limit is not None:
        data["evaluator"]["config"]["timeout_seconds"] = limit
    common = _copy(base.get("runtime") or {})
    steps = common.pop("prepare", [])
    own = common.pop("evaluation_prepare", None)
    judged = instance.task["evaluator"].get("runtime")
    if judged is not None:
        data["evaluator"]["runtime"] = _merged(
            common, _merged((base.get("evaluator") or {}).get("runtime") or {}, judged)
        )
    for spec in (data["runtime"], data["evaluator"].get("runtime")):
        if spec is not None:
            last = (judged if spec is not data["runtime"] else instance.task["runtime"]) or {}
            spec["evaluation_prepare"] = [*(steps if own is None else own), *last.get("evaluation_prepare", [])]
    return data


def _merged(base: Any, own: Any) -> Any:
    """`own` over `base`; lists of the two follow each other, so a template's prepare steps come first."""
    if isinstance(base, dict) and isinstance(own, dict):
        return {**base, **{k: _merged(base[k], v) if k in base else _copy(v) for k, v in own.items()}}
    if isinstance(base, list) and isinstance(own, list):
        return [*base, *own]
    return _copy(own)


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _task_id(name: str) -> str:
    text = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:100].strip("-_") or "task"
    return text if is_id(text) else f"task-{text}"


def _write(to: Path, made: list[tuple[Instance, TaskRequest]]) -> None:
    gold = to / "gold"
    gold.mkdir(parents=True, exist_ok=True)
    for instance, task in made:
        (to / f"{task.task_id}.json").write_bytes(to_json(task) + b"\n")
        solution = instance.gold or instance.gold_script
        if solution:
            (gold / f"{task.task_id}.{'sh' if instance.gold_script else 'patch'}").write_text(
                solution, encoding="utf-8"
            )


def _checked(instance: Instance, task: TaskRequest, s, quiet: bool):
    c = run_check(instance, task, s)
    if not quiet:
        err.print(f"{'ok' if c.good else 'BAD'} {c.name} ({c.seconds:.0f} s)")
    return c


def _table(checks) -> Table:
    table = Table("instance", "solution", "no change", "seconds", "")
    for c in checks:
        table.add_row(c.name, c.gold, c.empty, f"{c.seconds:.1f}", "" if c.good else c.message)
    return table
