"""Capture-only sessions: the user runs the agent; Polar gives it a model, records, rebuilds, and judges if it can."""

from __future__ import annotations

from evaluators.registry import load_evaluator
from polar.config import Settings
from polar.errors import Conflict, InvalidConfig, InvalidTask
from polar.session import Session
from polar.store.capture import CaptureStore, Grant
from polar.store.sessions import SessionStore
from polar.task import AgentSpec, TaskRequest
from reconstruction.registry import check_config
from submission.nudge import nudge

# The agent of such a session: nothing that Polar could launch.
EXTERNAL = AgentSpec(harness="external")


def open(store: SessionStore, capture: CaptureStore, settings: Settings, task: TaskRequest) -> tuple[Session, str, str]:
    """(session, base URL for the agent, capability, which is also its API key). The session ends when it is closed,
    cancelled, or after `task.timeout_seconds`. Raises InvalidTask, InvalidConfig, or Conflict if the id is taken."""
    if task.num_samples != 1:
        raise InvalidTask(f"num_samples: found {task.num_samples}, allowed for a capture-only session: 1")
    if not settings.proxy_url:
        raise InvalidConfig("proxy_url: not set; an agent could not reach the proxy")
    if settings.models:
        settings.model(task.agent.model_name)
    check_config(task.builder)
    if task.evaluator:
        load_evaluator(task.evaluator)
    session = store.open_capture(task)
    grant = Grant.of(task, session.session_id, session.attempt, capture.now() + task.timeout_seconds)
    capability = capture.mint(grant)
    return session, f"{settings.proxy_url.rstrip('/')}/s/{capability}", capability


def close(store: SessionStore, session_id: str) -> Session:
    """The agent is done: no further call is served, and POSTRUN begins. Idempotent. Raises NotFound, or Conflict for a
    session that Polar runs itself."""
    session = store.session(session_id)
    if session.mode != "capture":
        raise Conflict(f"session '{session_id}' is run by Polar; cancel it instead")
    if session.state == "RUNNING":
        CaptureStore(store.redis, store.keys).revoke(session.attempt_id)
        store.advance(session, "POSTRUN")
        nudge(store, [session_id])
    return store.session(session_id)
