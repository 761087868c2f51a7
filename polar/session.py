"""The session record: one independent attempt-chain of the policy at a task, as kept in the store."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from polar.codec import from_json
from polar.ids import attempt_id
from polar.result import ErrorInfo

State = Literal["PENDING", "ADMITTED", "INITIALIZING", "READY", "RUNNING", "POSTRUN", "DONE"]
STATES: tuple[State, ...] = ("PENDING", "ADMITTED", "INITIALIZING", "READY", "RUNNING", "POSTRUN", "DONE")


class Session(Struct, kw_only=True, omit_defaults=True):
    """A reading of the record. Times are Unix seconds on the store's clock, 0 where it hasn't happened (in this
    attempt). `fence` grows with each worker that takes it; `error` is the last attempt's."""

    session_id: str
    task_id: str
    index: int
    state: State
    attempt: int = 0
    fence: int = 0
    postrun_tries: int = 0
    mode: str = "managed"  # or "capture": the user runs the agent
    node: str = ""
    backend: str = ""
    queue: str = "results"
    worker: str = ""
    cancel: bool = False
    termination: str = ""
    verdict: str = ""
    reward: float | None = None
    error: ErrorInfo | None = None
    sandbox: bytes = b""  # msgpack SandboxRef of the present attempt
    run_report: bytes = b""  # msgpack RunReport, written at the end of RUN
    result: str = ""
    created: float = 0.0
    admitted: float = 0.0
    init_started: float = 0.0
    ready_at: float = 0.0
    run_started: float = 0.0
    run_ended: float = 0.0
    postrun_started: float = 0.0
    done_at: float = 0.0
    since: float = 0.0

    @property
    def attempt_id(self) -> str:
        return attempt_id(self.session_id, self.attempt)


def from_hash(session: str, h: dict[bytes, bytes]) -> Session:
    def text(name: str) -> str:
        return h.get(name.encode(), b"").decode()

    def number(name: str) -> float:
        return float(h.get(name.encode()) or 0)

    reward, error = text("reward"), text("error")
    strings = {n: text(n) for n in ("node", "backend", "queue", "worker", "termination", "verdict", "result")}
    times = {n: number(n) for n in _TIMES}
    return Session(
        session_id=session,
        task_id=text("task"),
        index=int(number("index")),
        state=text("state"),  # type: ignore[arg-type]
        attempt=int(number("attempt")),
        fence=int(number("fence")),
        postrun_tries=int(number("postrun_tries")),
        mode=text("mode") or "managed",
        cancel=text("cancel") == "1",
        reward=float(reward) if reward else None,
        error=from_json(error, ErrorInfo) if error else None,
        sandbox=h.get(b"sandbox", b""),
        run_report=h.get(b"run_report", b""),
        **strings,  # type: ignore[arg-type]
        **times,  # type: ignore[arg-type]
    )


_TIMES = (
    "created", "admitted", "init_started", "ready_at", "run_started", "run_ended", "postrun_started", "done_at", "since",
)  # fmt: skip
