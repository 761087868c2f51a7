"""Submission: all checks first, then one atomic write."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from polar.config import Settings
from polar.errors import InvalidTask
from polar.ids import session_id
from polar.objects import ObjectStore
from polar.store.sessions import SessionStore, packed
from polar.task import TaskRequest
from submission.uploads import upload_sources
from submission.validate import validate


def submit(
    tasks: Iterable[TaskRequest],
    store: SessionStore,
    objects: ObjectStore,
    settings: Settings,
    base: Path | dict[str, Path] | None = None,
) -> dict[str, list[str]]:
    """Session ids by task id. If any task is wrong, or its id is taken, nothing is enqueued (InvalidTask, Conflict).

    `base` is the folder that relative sources are taken from (or one per task id); None refuses local sources.
    """
    tasks = list(tasks)
    seen: set[str] = set()
    checked: list[tuple[TaskRequest, str]] = []
    for i, task in enumerate(tasks):
        try:
            packed(task)
            backend = validate(task, settings)
        except InvalidTask as e:
            raise type(e)(f"task '{task.task_id}': {e.message}") from e
        if task.task_id in seen:
            raise InvalidTask(f"tasks[{i}].task_id: '{task.task_id}' stands twice in this submission")
        seen.add(task.task_id)
        checked.append((task, backend))
    bases = base if isinstance(base, dict) else {t.task_id: base for t in tasks}
    ready = [(upload_sources(task, objects, bases[task.task_id]), backend) for task, backend in checked]
    store.submit_all(ready)
    return {t.task_id: [session_id(t.task_id, i) for i in range(t.num_samples)] for t, _ in ready}
