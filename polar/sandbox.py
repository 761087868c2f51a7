"""The sandbox contract: what a runtime back-end gives to the stages and to evaluators.

All calls block and are made from worker threads; each takes its own deadline. Everything a sandbox owns carries the
labels it was created with, so that it can be found and removed after its worker died.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from polar.task import RuntimeSpec


class ProxyEndpoint(Struct, frozen=True, kw_only=True):
    """Where the host finds the proxy's sandbox listener. A runtime brings it inside and tells the sandbox's own URL.

    `url` is http://host:port; `socket` the path of the same listener's Unix socket, where it has one.
    """

    url: str
    socket: str | None = None


class SandboxRef(Struct, frozen=True, kw_only=True):
    """A handle that survives its worker: any process on the node can attach to it."""

    backend: str
    handle: str  # container id, folder …
    proxy_url: str  # the proxy's base URL as seen from inside
    workdir: str
    labels: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)  # private to the back-end


class ExecResult(Struct, frozen=True, kw_only=True):
    """`exit_code` None: killed at its deadline (`timed_out`) or cancelled. `output` is the last bytes kept in memory
    (stdout and stderr in order of arrival); `output_bytes` counts all that was written."""

    exit_code: int | None
    timed_out: bool = False
    cancelled: bool = False
    output: bytes = b""
    output_bytes: int = 0
    seconds: float = 0.0


@runtime_checkable
class Sandbox(Protocol):
    """A created sandbox. Paths are absolute inside paths, or relative to the working directory."""

    ref: SandboxRef

    def exec(
        self,
        argv: list[str] | str,
        *,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes | None = None,
        timeout: float,
        log: Path | None = None,
        output_limit: int = 64 * 1024,
        log_limit: int = 16 * 1024 * 1024,
        cancelled: Callable[[], bool] | None = None,
    ) -> ExecResult:
        """Run a command (a str goes through `sh -c`). Output streams to the host file `log`, at most `log_limit`
        bytes (of more, its head and its end are kept); the last `output_limit` bytes come back. At the deadline, or when
        `cancelled()` turns true (polled at least every second), the command's whole process tree is killed. Raises
        InfraError `exec_failed` if the back-end itself failed."""
        ...

    def upload(self, source: Path, target: str, *, mode: int | None = None) -> None:
        """Put a host file or folder at `target` inside (parents are made; a folder is merged into an existing
        one). Raises InfraError `upload_failed`."""
        ...

    def write(self, target: str, data: bytes, *, mode: int = 0o644) -> None: ...

    def download(self, source: str, target: Path, *, limit: int) -> bool:
        """Copy a file or folder out, at most `limit` bytes in all; never follows a link out of the sandbox and never
        writes outside `target`. Works after `stop()`. True if it was truncated; nothing is at `target` then if what is
        there can't be copied (a pipe, a closed file). Raises NotFound when there is no such path, or it leads nowhere."""
        ...

    def baseline(self, under: str) -> bytes:
        """What lies below the folder `under` before an agent came, for `changes` (opaque)."""
        ...

    def changes(self, target: Path, *, under: str, baseline: bytes, limit: int) -> bool:
        """Write at the host file `target` an archive (see `polar.changes`, which also applies it to another sandbox) of
        all that differs below `under`: at least what changed since `baseline`, at most what changed since the sandbox was
        created. Works after `stop()`. True if it did not fit into `limit` bytes, or is too many files. Raises NotFound
        without such a folder."""
        ...

    def stop(self) -> None:
        """Kill every process of the agent, however it forked; the file system stays. Idempotent."""
        ...

    def destroy(self) -> None:
        """Remove everything. Idempotent; never fails because it is gone already."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """A sandbox back-end."""

    name: str

    def check(self, spec: RuntimeSpec) -> None:
        """Raise UnsupportedSpec (naming the field) if the back-end can't keep what `spec` asks for. No I/O."""
        ...

    def available(self) -> tuple[bool, str]:
        """Can sandboxes be made on this machine now? The text says with what, or what is missing."""
        ...

    def create(
        self, spec: RuntimeSpec, *, labels: dict[str, str], proxy: ProxyEndpoint | None, timeout: float
    ) -> Sandbox:
        """A fresh sandbox with nothing running. Raises InfraError (`runtime_create_failed`, `image_missing`).
        Nothing is left behind on failure."""
        ...

    def attach(self, ref: SandboxRef) -> Sandbox: ...

    def list(self, labels: dict[str, str]) -> list[SandboxRef]:
        """Every sandbox on this node that carries all these labels, also half-made ones."""
        ...


# Labels on everything that a sandbox owns.
LABEL_NAMESPACE = "polar.namespace"
LABEL_NODE = "polar.node"
LABEL_SESSION = "polar.session"
LABEL_ATTEMPT = "polar.attempt"
LABEL_PURPOSE = "polar.purpose"  # "agent" or "evaluation"
