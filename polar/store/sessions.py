"""Sessions and tasks in Redis: every transition is one atomic script, guarded by lease and fence."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from polar.codec import from_json, pack, to_json, unpack
from polar.errors import Conflict, InvalidTask, LeaseLost, NotFound, Unreadable
from polar.ids import session_id
from polar.result import ErrorInfo, LedgerLine
from polar.session import Session, from_hash
from polar.store.keys import Keys
from polar.store.scripts import register
from polar.task import GroupPolicy, TaskRequest


class Hint(Struct, frozen=True):
    """What a Celery message says: there may be work for this session. `queue` is where it goes."""

    queue: str
    stage: str
    session_id: str


class TaskStatus(Struct, kw_only=True):
    task_id: str
    total: int
    done: int
    created: float
    finished: float
    queue: str
    sessions: list[Session]


class SessionStore:
    """Blocking client of the store. Methods that take a `fence` raise LeaseLost when the session went on without them."""

    def __init__(self, client: Any, keys: Keys):
        self.redis = client
        self.keys = keys
        self._scripts: dict[str, Any] = {}

    def _run(self, name: str, *args: Any) -> Any:
        if name not in self._scripts:
            self._scripts[name] = register(self.redis, name)
        return self._scripts[name](keys=[self.keys.ns], args=list(args))

    # Tasks -----------------------------------------------------------------------------------------------------------

    def submit(self, task: TaskRequest, backend: str) -> list[str]:
        """Write one task and its sessions; the session ids. Conflict if the task exists."""
        self.submit_all([(task, backend)])
        return [session_id(task.task_id, i) for i in range(task.num_samples)]

    def submit_all(self, tasks: list[tuple[TaskRequest, str]], mode: str = "managed", seconds: float = 0) -> None:
        """Write tasks with the back-ends of their sessions, all or none. Conflict if one exists."""
        args: list[Any] = [mode, seconds]
        for t, backend in tasks:
            args += [t.task_id, packed(t), t.priority, t.results_queue, backend, t.callback_url or "", t.num_samples]
        if taken := self._run("submit", *args).decode():
            raise Conflict(f"task '{taken}' exists already")

    def open_capture(self, task: TaskRequest) -> Session:
        """A session whose agent the user runs: RUNNING at once, until closed or its timeout."""
        self.submit_all([(task, "")], mode="capture", seconds=task.timeout_seconds)
        return self.session(session_id(task.task_id, 0))

    def task(self, task_id: str) -> TaskRequest:
        """Raises NotFound, or Unreadable for what a newer version wrote."""
        raw = self.redis.hget(self.keys.task(task_id), "spec")
        if raw is None:
            raise NotFound(f"no task '{task_id}'")
        try:
            return unpack(raw, TaskRequest)
        except msgspec.MsgspecError as e:
            raise Unreadable(f"task '{task_id}' can't be read by this version: {e}") from e

    def forget(self, task_id: str, before: float) -> str:
        """Remove a task that ended before then (Unix seconds) and its sessions: the results queue it had, or "" if it stays."""
        return self._run("forget", task_id, before).decode()

    def task_ids(self, limit: int = 100) -> list[str]:
        """Newest first."""
        return [t.decode() for t in self.redis.zrevrange(self.keys.tasks, 0, limit - 1)]

    def task_status(self, task_id: str) -> TaskStatus:
        h = self.redis.hmget(self.keys.task(task_id), "total", "done", "created", "finished", "queue")
        if h[0] is None:
            raise NotFound(f"no task '{task_id}'")
        ids = [s.decode() for s in self.redis.lrange(self.keys.task_sessions(task_id), 0, -1)]
        return TaskStatus(
            task_id=task_id,
            total=int(h[0]),
            done=int(h[1]),
            created=float(h[2]),
            finished=float(h[3] or 0),
            queue=h[4].decode(),
            sessions=self.sessions(ids),
        )

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self, sid: str) -> Session:
        h = self.redis.hgetall(self.keys.session(sid))
        if not h:
            raise NotFound(f"no session '{sid}'")
        return from_hash(sid, h)

    def sessions(self, ids: Iterable[str]) -> list[Session]:
        ids = list(ids)
        pipe = self.redis.pipeline(transaction=False)
        for sid in ids:
            pipe.hgetall(self.keys.session(sid))
        return [from_hash(sid, h) for sid, h in zip(ids, pipe.execute(), strict=True) if h]

    def begin(self, sid: str, stage: str, node: str, worker: str, lease: float) -> Session | None:
        """The atomic start of a stage: None means there is nothing to do (a doubled or late message)."""
        flat = self._run("begin", sid, stage, node, worker, lease)
        return from_hash(sid, dict(zip(flat[::2], flat[1::2], strict=True))) if flat else None

    def renew(self, held: list[tuple[str, int]], lease: float) -> list[int]:
        """Per (session, fence): 1 renewed, 2 renewed and its cancel is wanted, 0 lost."""
        flat = [x for pair in held for x in pair]
        return [int(r) for r in self._run("renew", lease, *flat)] if held else []

    def advance(self, s: Session, target: str, **fields: Any) -> str:
        """INITIALIZING → READY or RUNNING → POSTRUN, with fields written. Returns the state reached."""
        flat = [x for pair in fields.items() for x in pair]
        reply = int(self._run("advance", s.session_id, s.fence, target, *flat))
        if reply == 0:
            raise LeaseLost(f"session {s.session_id}: fence {s.fence} is old")
        return "POSTRUN" if reply == 2 else target

    def fail(self, s: Session, line: LedgerLine, error: ErrorInfo, *, retry: bool, delay: float, mode: str) -> str:
        """An attempt failed in the machinery. mode: `worker`, `expired` or `waiting`. Returns `retry`, `postrun` or
        `stale` (somebody else was quicker)."""
        args = [s.session_id, s.fence, mode, to_json(line), to_json(error), int(retry), delay]
        return self._run("fail", *args).decode()

    def cancel(self, sid: str) -> str:
        """Ask for the end of a session; returns its state before. NotFound if there is none."""
        before = self._run("cancel", sid).decode()
        if not before:
            raise NotFound(f"no session '{sid}'")
        return before

    def release(self, sid: str, fence: int, mode: str = "worker") -> bool:
        return bool(self._run("release", sid, fence, mode))

    def commit(
        self,
        s: Session,
        key: str,
        termination: str,
        verdict: str,
        reward: float | None,
        line: LedgerLine,
        group: GroupPolicy,
    ) -> list[str]:
        """Publish the result, exactly once, and carry out the group's `cancel_rest`: the sessions that it sent to POSTRUN.
        LeaseLost if the fence is old."""
        text = "" if reward is None else repr(float(reward))
        args = [s.session_id, s.fence, key, termination, verdict, text, to_json(line)]
        reply = self._run("commit", *args, group.mode, group.k or 0, int(group.cancel_rest))
        if not reply[0]:
            raise LeaseLost(f"session {s.session_id}: fence {s.fence} is old")
        return [sid.decode() for sid in reply[1:]]

    def ledger(self, sid: str) -> list[LedgerLine]:
        return [from_json(line, LedgerLine) for line in self.redis.lrange(self.keys.ledger(sid), 0, -1)]

    # Admission and nodes ---------------------------------------------------------------------------------------------

    def admit(self, postrun_limit: int, node_timeout: float, limit: int = 64) -> list[tuple[str, str]]:
        """(session, node) pairs admitted now."""
        flat = [x.decode() for x in self._run("admit", postrun_limit, node_timeout, limit)]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def node_beat(self, node: str, ready: int, slots: int, backends: Iterable[str]) -> None:
        """A node's sign of life and what it offers: READY places, RUN slots, back-ends."""
        pipe = self.redis.pipeline(transaction=True)
        fields = {"beat": self.now(), "ready": ready, "slots": slots, "backends": ",".join(sorted(backends))}
        pipe.hset(self.keys.node(node), mapping=fields)
        pipe.sadd(self.keys.nodes, node)
        pipe.execute()

    def node_drain(self, node: str, draining: bool) -> None:
        self.redis.hset(self.keys.node(node), "draining", int(draining))

    def nodes(self) -> dict[str, dict[str, Any]]:
        out = {}
        for name in sorted(n.decode() for n in self.redis.smembers(self.keys.nodes)):
            h = {k.decode(): v.decode() for k, v in self.redis.hgetall(self.keys.node(name)).items()}
            out[name] = {
                "beat": float(h.get("beat", 0)),
                "slots": int(h.get("slots", 0)),
                "ready_places": int(h.get("ready", 0)),
                "ready": self.redis.scard(self.keys.node_ready(name)),
                "running": self.redis.scard(self.keys.node_running(name)),
                "backends": [b for b in h.get("backends", "").split(",") if b],
                "draining": h.get("draining") == "1",
                "init_failures": int(h.get("init_failures", 0)),  # in a row: it is kept back
            }
        return out

    def ring(self) -> None:
        """Tell whoever runs admission that a place may be free or a session may be new."""
        self.redis.lpush(self.keys.doorbell, "1")

    def now(self) -> float:
        seconds, micros = self.redis.time()
        return seconds + micros / 1e6

    # The reaper's view -----------------------------------------------------------------------------------------------

    def expired(self, limit: int = 200) -> list[Session]:
        ids = self.redis.zrangebyscore(self.keys.leases, "-inf", self.now(), start=0, num=limit)
        return self.sessions(i.decode() for i in ids)

    def overdue_hints(self, age: float, limit: int = 1000) -> list[Session]:
        ids = self.redis.zrangebyscore(self.keys.hints, "-inf", self.now() - age, start=0, num=limit)
        return self.sessions(i.decode() for i in ids)

    def hinted_again(self, ids: Iterable[str]) -> None:
        now = self.now()
        mapping = {i: now for i in ids}
        if mapping:
            self.redis.zadd(self.keys.hints, mapping, xx=True)

    def waiting_on(self, node: str) -> list[Session]:
        return self.sessions(i.decode() for i in self.redis.smembers(self.keys.node_ready(node)))

    def cleaned(self, node: str, attempt: str) -> None:
        self.redis.zrem(self.keys.cleanup, f"{node}|{attempt}")

    def backlog(self) -> dict[str, int]:
        """Sessions per place: pending, delayed, postrun, open."""
        backends = self.redis.smembers(self.keys.pending)
        pipe = self.redis.pipeline(transaction=False)
        pipe.zcard(self.keys.delayed)
        pipe.scard(self.keys.postrun)
        pipe.scard(self.keys.open)
        for backend in backends:
            pipe.zcard(self.keys.pending_of(backend.decode()))
        delayed, postrun, still_open, *pending = pipe.execute()
        return {"pending": sum(pending), "delayed": delayed, "postrun": postrun, "open": still_open}

    def wait(self, task_ids: Iterable[str], timeout: float, poll: float = 0.2) -> bool:
        """True when all tasks are done, False at the timeout."""
        deadline = time.monotonic() + timeout
        left = set(task_ids)
        while left:
            for t in list(left):
                total, done = self.redis.hmget(self.keys.task(t), "total", "done")
                if total is None:
                    raise NotFound(f"no task '{t}'")
                if int(done) >= int(total):
                    left.discard(t)
            if left and time.monotonic() > deadline:
                return False
            if left:
                time.sleep(poll)
        return True


def packed(task: TaskRequest) -> bytes:
    """As stored. Tasks made in Python were never checked against their types' bounds: InvalidTask for one that no worker
    could read."""
    try:
        data = pack(task)
        unpack(data, TaskRequest)
        return data
    except Exception as e:
        wrong = InvalidTask(f"can't be stored: {e}")
        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            from_json(to_json(task), TaskRequest, "")  # raises one that says where, and what is allowed
        raise wrong from e


def open_store(url: str, namespace: str) -> SessionStore:
    from polar.store.connection import connect

    return SessionStore(connect(url), Keys(namespace))
