"""The reference rollout server's objects, as far as a client of it sends or reads them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, field

from polar.task import Env, Id, McpServer, Prepare, Seconds


class _Strict(Struct, forbid_unknown_fields=True, kw_only=True):
    pass


class Shell(_Strict, kw_only=True):
    command: str
    cwd: str | None = None
    env: Env = field(default_factory=dict)


class Agent(_Strict, kw_only=True):
    harness: str | None = None
    import_path: str | None = None
    model_name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    env: Env = field(default_factory=dict)
    mcp_servers: list[McpServer] = field(default_factory=list)
    skills_path: str | None = None
    custom_shell: Shell | None = None

    def __post_init__(self):
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("exactly one of 'harness' and 'import_path' is needed")
        if self.custom_shell and self.harness != "shell":
            raise ValueError("'custom_shell' belongs to the 'shell' harness")
        if self.harness == "shell" and not self.custom_shell:
            raise ValueError("the 'shell' harness needs 'custom_shell'")


class Runtime(_Strict, kw_only=True):
    backend: str | None = None
    image: str | None = None
    prepare: list[Prepare] = field(default_factory=list)
    eval_prepare: list[Prepare] | None = None
    env: Env = field(default_factory=dict)
    network: str | None = None
    workdir: Annotated[str, Meta(pattern=r"^/")] | None = None
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Annotated[int, Meta(ge=1)] | None = None
    storage_mb: Annotated[int, Meta(ge=1)] | None = None
    gpus: Annotated[int, Meta(ge=0)] | None = None
    allow_internet: bool = True
    import_path: str | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


class Strategy(_Strict, kw_only=True):
    strategy: str = "per_request"
    config: dict[str, Any] = field(default_factory=dict)


class Evaluator(_Strict, kw_only=True):
    strategy: str
    config: dict[str, Any] = field(default_factory=dict)
    env: Env = field(default_factory=dict)
    refresh_runtime: bool = False


class Task(_Strict, kw_only=True):
    task_id: Id
    instruction: str
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    timeout_seconds: Seconds = 600.0
    runtime: Runtime | None = None
    agent: Agent
    builder: Strategy = field(default_factory=Strategy)
    evaluator: Evaluator | None = None
    callback_url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    dispatch_priority: Annotated[int, Meta(ge=0, le=100)] = 0
    early_stop_min_usable_sessions: Annotated[int, Meta(ge=1)] | None = None


Status = Literal["COMPLETED", "TIMEOUT", "ERROR"]


class Trace(Struct, kw_only=True, eq=False):
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_messages: list[Any] = field(default_factory=list)
    response_messages: list[Any] = field(default_factory=list)
    tools: list[Any] = field(default_factory=list)
    finish_reason: str = "stop"
    response_logprobs: np.ndarray | None = None
    reward: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class Trajectory(Struct, kw_only=True, eq=False):
    status: Status
    metadata: dict[str, Any] = field(default_factory=dict)
    traces: list[Trace] = field(default_factory=list)
    error: str | None = None


class SessionResult(Struct, kw_only=True, eq=False):
    session_id: str
    task_id: str
    status: Status
    trajectory: Trajectory
    timing: dict[str, float] = field(default_factory=dict)
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)


class TaskResult(Struct, kw_only=True, eq=False):
    """The body of a callback; `status` is "failed" when no session has anything to train on."""

    task_id: str
    status: Literal["pending", "running", "completed", "failed"]
    results: list[SessionResult] = field(default_factory=list)
    result_paths: list[str] = field(default_factory=list)


class TaskStatus(TaskResult, kw_only=True, eq=False):
    total_sessions: int = 0
    completed_sessions: int = 0
