"""Everything that can be known to be wrong with a task before anything is written."""

from __future__ import annotations

from pathlib import PurePosixPath

from msgspec import structs

from evaluators.registry import load_evaluator
from harness_adapters.common import ANY_ENDPOINT
from harness_adapters.registry import load_adapter
from polar.config import Settings
from polar.errors import InvalidConfig, InvalidTask, UnsupportedSpec
from polar.launch import Endpoint
from polar.task import AgentSpec, RuntimeSpec, TaskRequest
from reconstruction.registry import check_config
from runtimes.registry import load_runtime


def validate(task: TaskRequest, settings: Settings) -> str:
    """The back-end that the task will run on. Raises InvalidTask (one line, naming the field) if it never could."""
    adapter = load_adapter(task.agent)
    adapter.check(task.agent)
    # What the check of the agent alone can't see: this instruction, and the window of this model.
    adapter.plan(task.agent, task.instruction, _endpoint(task.agent, settings))
    check_config(task.builder)
    backend = _runtime(task.runtime, settings, "runtime")
    if task.evaluator:
        load_evaluator(task.evaluator)
        if task.evaluator.runtime:
            _runtime(task.evaluator.runtime, settings, "evaluator.runtime")
    return backend


def _endpoint(agent: AgentSpec, settings: Settings) -> Endpoint:
    """One with the window that RUN will find in the table of models; unbounded where there is no table."""
    endpoint = structs.replace(ANY_ENDPOINT, model=agent.model_name)
    if not settings.models:
        return endpoint
    try:
        _, row = settings.model(agent.model_name)
    except InvalidConfig as e:
        rows = ", ".join(sorted(settings.models))
        raise InvalidTask(
            f"agent.model_name: found '{agent.model_name}', allowed: {rows} (there is no default_model)"
        ) from e
    return structs.replace(endpoint, context_length=row.context_length)


def _runtime(spec: RuntimeSpec, settings: Settings, where: str) -> str:
    backend = spec.backend or settings.default_runtime
    runtime = _named(where, load_runtime, backend, settings)
    _named(where, runtime.check, spec)
    for i, volume in enumerate(spec.volumes):
        roots = settings.volume_roots
        source = PurePosixPath(volume.source)
        if ".." in source.parts or not any(source.is_relative_to(r) for r in roots):
            allowed = ", ".join(roots) or "none (set volume_roots)"
            raise UnsupportedSpec(
                f"{where}.volumes[{i}].source: found '{source}', allowed are folders below: {allowed}"
            )
    return backend


def _named(where: str, call, *args):
    """Prefix the field's place to what a back-end says of its own part."""
    try:
        return call(*args)
    except InvalidTask as e:
        if e.message.startswith(where):
            raise
        raise type(e)(f"{where}: {e.message}") from e
