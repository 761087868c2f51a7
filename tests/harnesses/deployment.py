"""A whole stack for real CLIs: store, proxy, workers as processes, and the scripted engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from cli.stack import Stack
from harness_adapters.versions import versions
from polar.codec import decompress, unpack
from polar.completion import Completion
from polar.config import Model, Settings
from polar.objects import open_objects
from polar.result import SessionResult
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, RetryPolicy, RuntimeSpec, TaskRequest, Volume
from submission import submit
from tests.harnesses.network import WAIT, Finder, Watch
from tests.harnesses.scripted_engine import ScriptedEngine

WINDOW = 400_000  # toy tokens are three to four times smaller than a real model's
SMALL = 60_000  # of the model "small": a CLI that doesn't compact comes to its end
INSIDE = "/polar"  # where bundles are mounted; the host's own /opt is what a local sandbox sees there


def bundles() -> Path | None:
    """The folder of POLAR_HARNESSES, which `polar images bundle` fills."""
    value = os.environ.get("POLAR_HARNESSES", "")
    return Path(value) if value else None


def missing(harness: str) -> str:
    """Why the CLI can't be run here; empty if it can."""
    root = bundles()
    if root is None:
        return "POLAR_HARNESSES (folder made by `polar images bundle`) is not set"
    if not (root / harness / "bundle.json").is_file():
        return f"POLAR_HARNESSES has no bundle of {harness}"
    return ""


class Deployment:
    def __init__(self, folder: Path, engine: ScriptedEngine, tokenizer: Path, **row: Any):
        self.engine, self.folder = engine, folder
        self.wrappers = folder / "watched"
        options: dict[str, Any] = {
            "tool_parser": "qwen3",
            "reasoning_parser": "think",
            "context_length": WINDOW,
            "max_new_tokens": 4096,
        } | row
        model = Model(engine=engine.url, tokenizer=str(tokenizer), **options)
        models = {"policy": model, "small": replace(model, context_length=SMALL)}
        roots = [str(self.wrappers), *([str(b)] if (b := bundles()) else [])]
        self.data = folder / "data"
        self.stack = Stack(Settings(data_dir=str(self.data), models=models, volume_roots=roots), slots=4)

    def __enter__(self) -> Deployment:
        try:
            self.settings = self.stack.start()
        except BaseException:
            self.stack.stop()
            raise
        self.store = SessionStore(connect(self.settings.store_url), Keys(self.settings.namespace))
        self.objects = open_objects(self.settings.objects_url)
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.stop()

    def in_image(
        self,
        task_id: str,
        harness: str,
        instruction: str,
        image: str,
        mount: bool,
        model: str = "policy",
        **changes: Any,
    ) -> TaskRequest:
        """A task in a Docker sandbox: the CLI is the image's own, or (`mount`) a bundle at the place where adapters look."""
        volumes = []
        if mount:
            root = bundles()
            assert root is not None
            volumes = [Volume(source=str(root / harness), target=f"/opt/polar/{harness}")]
        return TaskRequest(
            task_id=task_id,
            instruction=instruction,
            agent=AgentSpec(harness=harness, model_name=model, settings=changes.pop("settings", {})),
            runtime=RuntimeSpec(backend="docker", image=image, volumes=volumes, workdir="/work"),
            retry=RetryPolicy(max_attempts=1),
            timeout_seconds=240.0,
            **changes,
        )

    def task(
        self, task_id: str, harness: str, instruction: str, *, watched: bool, model: str = "policy", **changes: Any
    ) -> TaskRequest:
        """A task for a bundled CLI in a local sandbox. `watched`: it waits until its network is observed."""
        root = bundles()
        assert root is not None
        settings = dict(changes.pop("settings", {}))
        command = versions().harnesses[harness].command
        real = f"{INSIDE}/{harness}/bin/{command}"
        volumes = [Volume(source=str(root / harness), target=f"{INSIDE}/{harness}")]
        if watched:
            folder = self.wrappers / harness
            folder.mkdir(parents=True, exist_ok=True)
            (folder / command).write_text(WAIT % real)
            (folder / command).chmod(0o755)
            volumes.append(Volume(source=str(folder), target="/watched"))
            real = f"/watched/{command}"
        agent = AgentSpec(harness=harness, model_name=model, settings={"command": real, **settings})
        changes.setdefault("timeout_seconds", 240.0)
        changes.setdefault("retry", RetryPolicy(max_attempts=1))
        runtime = RuntimeSpec(backend="local", options={"isolation": "bwrap"}, volumes=volumes)
        return TaskRequest(task_id=task_id, instruction=instruction, agent=agent, runtime=runtime, **changes)

    def run(self, task: TaskRequest, *, watched: bool, seconds: float = 280) -> tuple[SessionResult, Watch]:
        watch = Watch(Finder(f"{task.task_id}.s0", self.data))
        if watched:
            watch.__enter__()
        try:
            submit([task], self.store, self.objects, self.settings)
            if not self.store.wait([task.task_id], seconds, poll=0.1):
                raise AssertionError(f"not done: {self.store.task_status(task.task_id).sessions}")
        finally:
            if watched:
                watch.__exit__()
        (session,) = self.store.task_status(task.task_id).sessions
        return unpack(decompress(self.objects.get(session.result)), SessionResult), watch

    def captured(self, result: SessionResult) -> list[Completion]:
        if not result.capture_key:
            return []
        return unpack(decompress(self.objects.get(result.capture_key)), list[Completion])

    def artifact(self, result: SessionResult, name: str) -> bytes:
        """Its bytes; empty if the session left none of that name."""
        return next((self.objects.get(a.key) for a in result.artifacts if a.name == name), b"")
