"""Capture-only sessions over HTTP: bring your own runner."""

from __future__ import annotations

from typing import Annotated, Any

from aiohttp import web
from msgspec import Meta, Struct, field, structs

from api.control import control
from api.wire import ident, query, read, reply
from polar.ids import new_id
from polar.task import BuilderSpec, EvaluatorSpec, Id, Label, Positive, SamplingSpec, Seconds, TaskRequest
from submission import capture_only


class CaptureRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a task that mean something when the user runs the agent."""

    task_id: Id = field(default_factory=lambda: new_id("task"))
    instruction: str = ""
    model_name: str = "policy"
    sampling: SamplingSpec = field(default_factory=SamplingSpec)
    timeout_seconds: Seconds = 3600.0
    evaluation_timeout_seconds: Seconds = 600.0
    max_turns: Positive | None = None
    max_total_tokens: Positive | None = None
    builder: BuilderSpec = field(default_factory=BuilderSpec)
    evaluator: EvaluatorSpec | None = None
    results_queue: Id = "results"
    callback_url: Annotated[str, Meta(pattern=r"^https?://")] | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    labels: dict[Label, str] = field(default_factory=dict)

    def task(self) -> TaskRequest:
        agent = structs.replace(capture_only.EXTERNAL, model_name=self.model_name, sampling=self.sampling)
        rest = {f: getattr(self, f) for f in self.__struct_fields__ if f not in ("model_name", "sampling")}
        return TaskRequest(agent=agent, **rest)


def routes() -> list[web.RouteDef]:
    return [web.post("/v1/capture", create), web.post("/v1/capture/{session}/close", close)]


async def create(request: web.Request) -> web.Response:
    query(request)
    c = control(request)
    wanted = await read(request, CaptureRequest, empty=b"{}")
    session, url, capability = await c.call(capture_only.open, c.store, c.capture, c.settings, wanted.task())
    out = {"session_id": session.session_id, "task_id": session.task_id, "base_url": url, "api_key": capability}
    return reply(out | {"model": wanted.model_name, "expires_in": wanted.timeout_seconds}, 201)


async def close(request: web.Request) -> web.Response:
    query(request)
    c = control(request)
    session = await c.call(capture_only.close, c.store, ident(request, "session"))
    return reply({"session_id": session.session_id, "state": session.state})
