"""Settings of a deployment: one TOML file, overridden by POLAR_* environment variables. Unknown keys are refused.

A list of texts is given there separated by commas; the model table only in the file.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field, structs

from polar.codec import convert
from polar.errors import InvalidConfig, InvalidTask

Seconds = Annotated[float, Meta(gt=0)]


class Model(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One row of the model table. `tokenizer` is a folder or hub name; `renderer` a name known to `renderers`, or
    "template" for the tokenizer's own chat template."""

    engine: str | list[str]  # base URL of the inference server, or of several that serve the same weights
    # SGLang's /generate, vLLM's /inference/v1/generate, or any OpenAI-compatible /v1/chat/completions.
    protocol: Literal["sglang", "vllm", "openai"] = "sglang"
    engine_model: str = ""  # the model's name at the server, where it wants one; empty: the row's name
    tokenizer: str
    renderer: str = "template"
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    context_length: Annotated[int, Meta(ge=1)] = 8192
    max_new_tokens: Annotated[int, Meta(ge=1)] = 1024  # of one answer at most; task and harness may ask for less
    # An image in a request: refused, or replaced by a line of text that says so.
    images: Literal["placeholder", "refuse"] = "placeholder"
    api_key_env: str | None = None  # name of the variable that holds the engine's key

    @property
    def engines(self) -> list[str]:
        return [self.engine] if isinstance(self.engine, str) else list(self.engine)


class Settings(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`broker` and `store` are redis://, rediss://, unix:// or sentinel:// URLs; `objects` is file:///path or
    s3://bucket/prefix?endpoint=http://…  (credentials from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)."""

    data_dir: str = ".polar"
    namespace: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$(?!\n)")] = "polar"
    broker: str = ""
    store: str = ""  # empty: the same as the broker
    objects: str = ""  # empty: file://<data_dir>/objects
    models: dict[str, Model] = field(default_factory=dict)
    default_model: str = "policy"
    default_runtime: str = "local"
    runtimes: list[str] = field(default_factory=list)  # back-ends that tasks may use; empty: all that are installed

    proxy_url: str = ""  # the sandbox-facing listener as the node's host sees it
    proxy_socket: str = ""  # the same on a Unix socket
    api_url: str = ""  # where the control plane answers: for people and scripts
    api_token_env: str = "POLAR_API_TOKEN"

    lease_seconds: Seconds = 15.0
    node_timeout_seconds: Seconds = 15.0
    hint_overdue_seconds: Seconds = 10.0  # a waiting session whose message may be lost is announced again after this
    reap_interval_seconds: Seconds = 1.0
    ready_places: Annotated[int, Meta(ge=1)] = 4  # sessions per node between admission and RUN
    # Sandboxes that each worker process keeps ready for what was asked for lately (0: none), and how long it keeps them.
    warm_sandboxes: Annotated[int, Meta(ge=0, le=256)] = 0
    warm_seconds: Seconds = 300.0
    postrun_limit: Annotated[int, Meta(ge=1)] = 64  # POSTRUN backlog above which nothing is admitted
    volume_roots: list[str] = field(default_factory=list)  # host folders that tasks may mount (read-only)
    keep_capture: bool = True
    keep_days: Annotated[float, Meta(ge=0, le=36500)] = (
        90.0  # how long the store remembers tasks that ended; 0: for ever
    )
    artifact_limit_bytes: Annotated[int, Meta(ge=1)] = 64 * 1024 * 1024
    drain_seconds: Seconds = 20.0  # how long POSTRUN waits for generations still in flight after a run

    @property
    def store_url(self) -> str:
        return self.store or self.broker

    @property
    def objects_url(self) -> str:
        return self.objects or f"file://{Path(self.data_dir).resolve()}/objects"

    def model(self, name: str) -> tuple[str, Model]:
        """The table's row for `name`; a name that the table doesn't have means the default model."""
        key = name if name in self.models else self.default_model
        if key not in self.models:
            raise InvalidConfig(f"models: no row for '{name}' and no default; rows: {sorted(self.models) or 'none'}")
        return key, self.models[key]


def load(path: str | Path | None = None, env: dict[str, str] | None = None, **overrides: Any) -> Settings:
    """Settings from `path` (else $POLAR_CONFIG, else ./polar.toml if present), then POLAR_<FIELD>, then `overrides`."""
    env = dict(os.environ) if env is None else env
    explicit = path or env.get("POLAR_CONFIG")
    file = Path(explicit) if explicit else Path("polar.toml")
    data: dict[str, Any] = {}
    if file.is_file():
        try:
            data = tomllib.loads(file.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
            raise InvalidConfig(f"{file}: not valid TOML: {e}") from e
    elif explicit:
        raise InvalidConfig(f"{file}: no such file")
    given: dict[str, str] = {}  # field -> its variable
    for f in structs.fields(Settings):
        variable = _variable(f.name)
        if variable in env and overrides.get(f.name) is None:
            data[f.name] = _value(env[variable], f.type, variable)
            given[f.name] = variable
    data.update({k: v for k, v in overrides.items() if v is not None})
    try:
        return convert(data, Settings, str(file) if file.is_file() else "settings")
    except InvalidTask as e:
        variable = given.get(re.split(r"[.\[]", e.field)[0], "")
        raise InvalidConfig(e.message + (f" (from {variable})" if variable else "")) from e


def _variable(field: str) -> str:
    return f"POLAR_{field.upper()}"


def without_settings(env: Mapping[str, str]) -> dict[str, str]:
    """For a child whose settings file has the last word."""
    names = {_variable(f.name) for f in structs.fields(Settings)} | {"POLAR_CONFIG"}
    return {k: v for k, v in env.items() if k not in names}


def _value(value: str, typ: Any, variable: str) -> Any:
    """The text of a variable as what its field takes; what doesn't fit is left to the check of the whole."""
    if typ == list[str]:
        items = [x.strip() for x in value.split(",")]
        if "" in items:  # nothing at all must not lift a restriction either
            raise InvalidConfig(f"{variable}: found {value!r}, allowed: texts separated by commas")
        return items
    name = str(typ)
    if name.startswith("dict"):
        raise InvalidConfig(
            f"{variable}: a table can't be given in the environment; allowed: in the settings file only"
        )
    if typ is bool:
        return {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    for cast, word in ((int, "int"), (float, "float")):
        if word in name:
            try:
                return cast(value)
            except ValueError:
                return value
    return value
