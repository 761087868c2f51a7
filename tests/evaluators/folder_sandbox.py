"""A sandbox for tests of evaluators: a temporary folder and subprocesses. Absolute paths below its root only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from polar.errors import NotFound
from polar.judge import Outcome
from polar.sandbox import ExecResult, SandboxRef
from polar.task import AgentSpec, EvaluatorSpec, TaskRequest
from polar.trace import Fidelity, Trajectory


class FolderSandbox:
    def __init__(self, root: Path):
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve()
        self.ref = SandboxRef(backend="folder", handle=str(root), proxy_url="", workdir=str(self.root))
        self.stopped = False

    def _path(self, path: str) -> Path:
        return Path(os.path.join(self.root, path))

    def exec(self, argv, *, env=None, cwd=None, stdin=None, timeout, log=None, output_limit=65536, **_) -> ExecResult:
        started = time.monotonic()
        p = subprocess.Popen(
            ["sh", "-c", argv] if isinstance(argv, str) else argv,
            cwd=self._path(cwd or "."),
            env={"PATH": os.environ["PATH"], **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            output, _err = p.communicate(stdin, timeout=timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(p.pid, signal.SIGKILL)
            output, _err = p.communicate()
        if log:
            log.write_bytes(output)
        return ExecResult(
            exit_code=None if timed_out else p.returncode,
            timed_out=timed_out,
            output=output[-output_limit:],
            output_bytes=len(output),
            seconds=time.monotonic() - started,
        )

    def upload(self, source: Path, target: str, *, mode: int | None = None) -> None:
        path = self._path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, path, symlinks=True, dirs_exist_ok=True)
        else:
            shutil.copy(source, path)

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None:
        path = self._path(target)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        path = self._path(source)
        if not path.is_file():
            raise NotFound(source)
        data = path.read_bytes()
        target.write_bytes(data[:limit])
        return len(data) > limit

    def stop(self) -> None:
        self.stopped = True

    def destroy(self) -> None:
        pass


def outcome(
    folder: Path, sandbox: Any = None, *, artifacts: dict[str, Path] | None = None, seconds: float = 60.0, **kw: Any
) -> Outcome:
    logs = folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    env = kw.pop("env", {})
    box = sandbox or FolderSandbox(folder / "fresh")
    return Outcome(
        task=TaskRequest(
            agent=AgentSpec(harness="shell", command="true"),
            instruction="",
            evaluator=EvaluatorSpec(name="test_on_output", env=env),
        ),
        session_id="t.s0",
        attempt=1,
        termination=kw.pop("termination", "finished"),
        trajectory=Trajectory(builder="x", fidelity=Fidelity(completions=kw.pop("completions", 1))),
        artifacts=artifacts or {},
        sandbox=lambda: box,
        remaining=lambda: seconds,
        logs=logs,
    )
