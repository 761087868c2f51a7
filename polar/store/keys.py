"""Every Redis key Polar uses, in one place."""

from __future__ import annotations


class Keys:
    """Names under one namespace. Several deployments may share a server under different namespaces."""

    def __init__(self, namespace: str):
        self.ns = namespace
        p = namespace + ":"
        # Sessions
        self.pending = p + "pending-backends"  # SET of the back-ends that sessions may wait for
        self.delayed = p + "delayed"  # ZSET session -> due time, sessions waiting out a retry backoff
        self.leases = p + "leases"  # ZSET session -> expiry
        self.hints = p + "hints"  # ZSET session -> time of its last message, while it waits for a worker
        self.postrun = p + "postrun"  # SET of sessions in POSTRUN: the backlog
        self.nodes = p + "nodes"  # SET of node names
        self.open = p + "open"  # SET of sessions not yet DONE
        self.tasks = p + "tasks"  # ZSET task -> creation time
        self.done = p + "done"  # counters: HASH of termination:… / verdict:… -> n
        self.doorbell = p + "doorbell"  # LIST, rung when admission may have work
        self.events = p + "events"  # STREAM of state changes for people
        self.callbacks = p + "callbacks"  # STREAM of finished tasks whose owner asked to be called
        self.cleanup = p + "cleanup"  # ZSET node|attempt -> time, sandboxes to remove
        # Proxy
        self.revoked = p + "revoked"  # STREAM of attempts whose capability ended
        self.proxies = p + "proxies"  # HASH proxy id -> last sign of life

    def pending_of(self, backend: str) -> str:
        """ZSET session -> order (lower goes first)."""
        return f"{self.ns}:pending:{backend}"

    def task(self, task_id: str) -> str:
        return f"{self.ns}:task:{task_id}"

    def task_sessions(self, task_id: str) -> str:
        return f"{self.ns}:task:{task_id}:sessions"

    def session(self, session_id: str) -> str:
        return f"{self.ns}:session:{session_id}"

    def ledger(self, session_id: str) -> str:
        return f"{self.ns}:session:{session_id}:ledger"

    def node(self, name: str) -> str:
        return f"{self.ns}:node:{name}"

    def node_ready(self, name: str) -> str:
        """SET of sessions that hold a READY place on the node: ADMITTED, INITIALIZING or READY."""
        return f"{self.ns}:node:{name}:ready"

    def node_running(self, name: str) -> str:
        return f"{self.ns}:node:{name}:running"

    def warm(self, node: str, backend: str) -> str:
        """HASH handle -> labels, of sandboxes made in advance whose own labels are no longer true."""
        return f"{self.ns}:warm:{node}:{backend}"

    def warm_owner(self, owner: str) -> str:
        """Expires unless the process that keeps warm sandboxes renews it."""
        return f"{self.ns}:warm-owner:{owner}"

    def results(self, queue: str) -> str:
        """STREAM of result references, one per session."""
        return f"{self.ns}:results:{queue}"

    def groups(self, queue: str) -> str:
        """STREAM of complete groups, one per task."""
        return f"{self.ns}:groups:{queue}"

    def capability(self, digest: str) -> str:
        return f"{self.ns}:cap:{digest}"

    def attempt(self, attempt_id: str) -> str:
        """HASH: state, turns, token counters of an attempt as the proxy counts them."""
        return f"{self.ns}:att:{attempt_id}"

    def inflight(self, attempt_id: str) -> str:
        """HASH completion id -> proxy id|index, generations begun and not yet stored."""
        return f"{self.ns}:att:{attempt_id}:inflight"

    def stored(self, attempt_id: str) -> str:
        """SET of completion ids that are in the capture stream: each is stored once."""
        return f"{self.ns}:att:{attempt_id}:stored"

    def capture(self, attempt_id: str) -> str:
        """STREAM of completions: field `c` holds one msgpack Completion."""
        return f"{self.ns}:att:{attempt_id}:capture"
