"""The task contract: one problem instance plus how to run and judge it."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct, field

from polar.errors import InvalidTask
from polar.explain import NO_NUL
from polar.ids import ID_PATTERN, new_id

SCHEMA: Final = 1

Id = Annotated[str, Meta(pattern=ID_PATTERN)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 86400)]
Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
EnvName = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$(?!\n)")]
Env = dict[EnvName, Annotated[str, Meta(pattern=NO_NUL)]]
Label = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,62}$(?!\n)")]


class _Strict(Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    pass


class _Prepare(_Strict, kw_only=True, tag_field="type"):
    max_attempts: Annotated[int, Meta(ge=1, le=20)] = 1
    retry_backoff_seconds: Annotated[float, Meta(ge=0, le=600)] = 1.0


class UploadFile(_Prepare, kw_only=True, tag="upload_file"):
    """Put one file into the sandbox: from `content` (text), or from `source` (a path, or `object://<key>`)."""

    target: str
    source: str | None = None
    content: str | None = None
    mode: Annotated[int, Meta(ge=0, le=0o777)] = 0o644

    def __post_init__(self):
        if (self.source is None) == (self.content is None):
            raise ValueError("upload_file needs exactly one of 'source' and 'content'")


class UploadDir(_Prepare, kw_only=True, tag="upload_dir"):
    """Put a folder into the sandbox: `source` is a path, or `object://<key>` of a tar archive."""

    source: str
    target: str


class Exec(_Prepare, kw_only=True, tag="exec"):
    """Run a shell command in the sandbox; a non-zero exit fails the stage."""

    command: str
    cwd: str | None = None
    env: Env = field(default_factory=dict)
    timeout_seconds: Seconds | None = None


Prepare = UploadFile | UploadDir | Exec


class Volume(_Strict, kw_only=True):
    """An extra read-only mount of a host folder. Writable mounts are refused: they outlive the sandbox."""

    source: str
    target: str


class RuntimeSpec(_Strict, kw_only=True):
    """The sandbox. `backend` None means the deployment's default."""

    backend: str | None = None
    image: str | None = None
    prepare: list[Prepare] = field(default_factory=list)
    evaluation_prepare: list[Prepare] | None = None  # None: the same steps as `prepare`
    env: Env = field(default_factory=dict)
    workdir: Annotated[str, Meta(pattern=r"^/")] | None = None
    cpus: Annotated[float, Meta(gt=0)] | None = None
    memory_mb: Positive | None = None
    pids: Positive | None = None
    disk_mb: Positive | None = None  # what the sandbox may write
    open_files: Positive | None = None  # of each process
    user: str | None = None  # who runs its commands: a name, "uid" or "uid:gid"; None: the back-end's own choice
    gpus: NonNegative = 0
    network: Literal["proxy-only", "none", "internet"] = "proxy-only"
    volumes: list[Volume] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


class McpServer(_Strict, kw_only=True):
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "stdio"
    command: str | None = None
    args: list[str] = field(default_factory=list)
    url: str | None = None
    env: Env = field(default_factory=dict)

    def __post_init__(self):
        if self.transport == "stdio" and not self.command:
            raise ValueError("an MCP server with transport 'stdio' needs 'command'")
        if self.transport != "stdio" and not self.url:
            raise ValueError(f"an MCP server with transport '{self.transport}' needs 'url'")


class SamplingSpec(_Strict, kw_only=True):
    """The policy's sampling, pinned per task. Defaults leave the distribution untouched, so the captured
    logprob is the policy's own. `honour_harness` lets the harness's request override these fields."""

    temperature: Annotated[float, Meta(ge=0, le=10)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    max_new_tokens: Positive | None = None
    seed: int | None = None
    honour_harness: bool = False


class AgentSpec(_Strict, kw_only=True):
    """Exactly one of `harness` (a registered name) and `import_path` ("module:Class")."""

    harness: str | None = None
    import_path: str | None = None
    model_name: str = "policy"
    command: str | None = None  # the `shell` harness runs this
    settings: dict[str, Any] = field(default_factory=dict)
    env: Env = field(default_factory=dict)
    mcp_servers: list[McpServer] = field(default_factory=list)
    skills_path: str | None = None
    sampling: SamplingSpec = field(default_factory=SamplingSpec)

    def __post_init__(self):
        if (self.harness is None) == (self.import_path is None):
            raise ValueError("agent needs exactly one of 'harness' and 'import_path'")
        if self.harness == "shell" and not self.command:
            raise ValueError("the 'shell' harness needs 'command'")
        if self.harness not in (None, "shell") and self.command:
            raise ValueError(f"'command' belongs to the 'shell' harness, not to '{self.harness}'")


class BuilderSpec(_Strict, kw_only=True):
    strategy: str = "exact"
    config: dict[str, Any] = field(default_factory=dict)


class EvaluatorSpec(_Strict, kw_only=True):
    """`name` is a registered evaluator or "module:Class". `runtime` replaces the task's sandbox for judging."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    env: Env = field(default_factory=dict)
    prewarm: bool = False
    runtime: RuntimeSpec | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=10)] = 2


class RetryPolicy(_Strict, kw_only=True):
    """Attempts after infrastructure failures. `per_code` sets another bound for single error codes
    (0 forbids a retry for it); `empty_generations` bounds retries of attempts that made no model call."""

    max_attempts: Annotated[int, Meta(ge=1, le=20)] = 3
    per_code: dict[str, NonNegative] = field(default_factory=dict)
    empty_generations: NonNegative = 1
    backoff_seconds: Annotated[float, Meta(ge=0, le=3600)] = 1.0

    def allows(self, code: str, retryable: bool, attempts_made: int) -> bool:
        """May another attempt start after attempt number `attempts_made` failed with `code`?"""
        bound = self.max_attempts
        if code == "no_completions":
            bound = self.empty_generations + 1
        if code in self.per_code:
            bound = self.per_code[code] + 1
        return retryable and attempts_made < bound


class GroupPolicy(_Strict, kw_only=True):
    """When a task's group reaches the results queue: `strict` at its last session, `min_k` as soon as `k`
    sessions carry a reward (the rest is cancelled if `cancel_rest`)."""

    mode: Literal["strict", "min_k"] = "strict"
    k: Positive | None = None
    cancel_rest: bool = False

    def __post_init__(self):
        if (self.mode == "min_k") != (self.k is not None):
            raise ValueError("group policy 'min_k' needs 'k', and 'strict' takes none")


class TaskRequest(_Strict, kw_only=True):
    """What a user submits. Expands into `num_samples` sessions."""

    agent: AgentSpec
    instruction: str
    task_id: Id = field(default_factory=lambda: new_id("task"))
    num_samples: Annotated[int, Meta(ge=1, le=4096)] = 1
    priority: Annotated[int, Meta(ge=0, le=100)] = 0  # higher goes first
    timeout_seconds: Seconds = 600.0  # INIT + RUN together
    agent_timeout_seconds: Seconds | None = None  # RUN alone
    evaluation_timeout_seconds: Seconds = 600.0
    max_turns: Positive | None = None
    max_total_tokens: Positive | None = None
    runtime: RuntimeSpec = field(default_factory=RuntimeSpec)
    builder: BuilderSpec = field(default_factory=BuilderSpec)
    evaluator: EvaluatorSpec | None = None
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    group: GroupPolicy = field(default_factory=GroupPolicy)
    results_queue: Id = "results"
    callback_url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    artifacts: list[str] = field(default_factory=list)  # sandbox paths collected after the run
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: dict[Label, str] = field(default_factory=dict)
    schema_version: Literal[1] = SCHEMA

    def __post_init__(self):
        if self.group.k is not None and self.group.k > self.num_samples:
            raise ValueError(f"group.k is {self.group.k}, allowed is at most num_samples ({self.num_samples})")


def replace(task: TaskRequest, **changes: Any) -> TaskRequest:
    try:
        return msgspec.structs.replace(task, **changes)
    except (ValueError, TypeError) as e:
        raise InvalidTask(str(e)) from e
