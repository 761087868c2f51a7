"""The reference server's task in our terms. What can't be kept is refused with the field's name.

Three things are kept in another form: judging is always in a fresh sandbox, so `refresh_runtime` only decides whether it
is made ahead of time; a sandbox that may use the network gets an ordinary one, never the host's; and `timeout_seconds`
bounds INIT and RUN, while judging has a budget of its own of the same size.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

from api import compat_models as ref
from polar.codec import convert
from polar.errors import InvalidTask, UnsupportedSpec
from polar.task import (
    AgentSpec,
    BuilderSpec,
    EvaluatorSpec,
    GroupPolicy,
    RuntimeSpec,
    TaskRequest,
    Volume,
)

# Our names for what an error may point at -> the names the client used.
_NAMES = {
    "runtime.evaluation_prepare": "runtime.eval_prepare",
    "runtime.disk_mb": "runtime.storage_mb",
    "evaluator.name": "evaluator.strategy",
    "agent.command": "agent.custom_shell",
}


def translate(data: Any) -> TaskRequest:
    """Raises InvalidTask or UnsupportedSpec naming the client's own field."""
    task = convert(data, ref.Task, "body")
    try:
        return _translate(task)
    except ValueError as e:  # a rule of ours that theirs lack
        raise InvalidTask(f"body: {e}") from e


def _translate(task: ref.Task) -> TaskRequest:
    agent_timeout = task.metadata.get("agent_timeout")
    if agent_timeout is not None and not _positive(agent_timeout):
        raise _wrong("metadata.agent_timeout", f"found {str(agent_timeout)[:40]}, allowed: number > 0")
    k = task.early_stop_min_usable_sessions
    if k is not None and k > task.num_samples:
        raise _wrong("early_stop_min_usable_sessions", f"found {k}, allowed: at most num_samples ({task.num_samples})")
    evaluator = None
    if task.evaluator:
        e = task.evaluator
        evaluator = EvaluatorSpec(name=e.strategy, config=e.config, env=e.env, prewarm=e.refresh_runtime)
    return TaskRequest(
        task_id=task.task_id,
        instruction=task.instruction,
        num_samples=task.num_samples,
        priority=task.dispatch_priority,
        timeout_seconds=task.timeout_seconds,
        agent_timeout_seconds=float(agent_timeout) if agent_timeout is not None else None,
        evaluation_timeout_seconds=task.timeout_seconds,
        runtime=_runtime(task.runtime) if task.runtime else RuntimeSpec(),
        agent=_agent(task.agent),
        builder=BuilderSpec(strategy=task.builder.strategy, config=task.builder.config),
        evaluator=evaluator,
        group=GroupPolicy(mode="min_k", k=k, cancel_rest=True) if k else GroupPolicy(),
        callback_url=task.callback_url,
        metadata=task.metadata,
    )


def in_their_words(e: InvalidTask) -> InvalidTask:
    """An error that our own checks raised, with the client's field names."""
    for ours, theirs in _NAMES.items():
        if ours in e.message:
            out = type(e)(e.message.replace(ours, theirs))
            out.field = theirs
            return out
    return e


def _agent(a: ref.Agent) -> AgentSpec:
    command, env = None, dict(a.env)
    if a.custom_shell:
        if a.mcp_servers or a.skills_path:
            raise _wrong("agent.custom_shell", "excludes mcp_servers and skills_path")
        command = a.custom_shell.command
        if a.custom_shell.cwd:
            command = f"cd {shlex.quote(a.custom_shell.cwd)} && {{ {command}\n}}"
        env |= a.custom_shell.env
    return AgentSpec(
        harness=a.harness,
        import_path=a.import_path,
        model_name=a.model_name or "policy",
        command=command,
        settings=a.settings,
        env=env,
        mcp_servers=a.mcp_servers,
        skills_path=a.skills_path,
    )


def _runtime(r: ref.Runtime) -> RuntimeSpec:
    if r.import_path is not None:
        raise _cannot("runtime.import_path", "runtimes are registered with the deployment; name one in 'backend'")
    return RuntimeSpec(
        backend=r.backend,
        image=r.image,
        prepare=r.prepare,
        evaluation_prepare=r.eval_prepare,
        env=r.env,
        network=_network(r),  # type: ignore[arg-type]
        workdir=r.workdir,
        cpus=r.cpus,
        memory_mb=r.memory_mb,
        disk_mb=r.storage_mb,
        gpus=r.gpus or 0,
        volumes=_volumes(r.kwargs),
    )


def _network(r: ref.Runtime) -> str:
    if r.network not in (None, "host", "bridge", "none"):
        raise _cannot("runtime.network", f"found '{r.network[:40]}', allowed: 'host', 'bridge', 'none'")
    # The proxy is reached in every case: also without a network the agent talks to its model.
    return "internet" if r.allow_internet and r.network != "none" else "proxy-only"


def _volumes(kwargs: dict[str, Any]) -> list[Volume]:
    for key in kwargs:
        if key != "volumes":
            raise _cannot(f"runtime.kwargs.{key[:80]}", "allowed: volumes")
    items = kwargs.get("volumes", [])
    if not isinstance(items, list):
        raise _wrong("runtime.kwargs.volumes", "allowed: list of 'source:target:ro'")
    out = []
    for i, item in enumerate(items):
        parts = item.split(":") if isinstance(item, str) else []
        if len(parts) != 3 or parts[2] != "ro":
            # Without `ro` the reference mounts it writable, which outlives the sandbox.
            raise _cannot(f"runtime.kwargs.volumes[{i}]", f"found {str(item)[:80]!r}, allowed: 'source:target:ro'")
        out.append(Volume(source=parts[0], target=parts[1]))
    return out


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _wrong(field: str, message: str) -> InvalidTask:
    e = InvalidTask(f"{field}: {message}")
    e.field = field
    return e


def _cannot(field: str, message: str) -> UnsupportedSpec:
    e = UnsupportedSpec(f"{field}: can't be kept: {message}")
    e.field = field
    return e
