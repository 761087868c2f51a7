"""RUN: the harness works in its sandbox under its budgets; then everything of it is stopped and its artifacts are kept."""

from __future__ import annotations

import time
from pathlib import Path

from harness_adapters.registry import load_adapter
from polar.codec import pack, unpack
from polar.errors import InfraError, LeaseLost
from polar.launch import Endpoint, HarnessAdapter
from polar.result import Artifact
from polar.sandbox import ExecResult, Sandbox, SandboxRef
from polar.session import Session
from polar.store.capture import Grant
from polar.store.sessions import Hint
from polar.task import TaskRequest
from workers.admission import dispatch
from workers.app import queue_for, send
from workers.cleanup import discard
from workers.collect import LOG_LIMIT, collect, keep_changes, keep_log, salvage
from workers.context import Context
from workers.failures import Shutdown, as_error, fail_attempt
from workers.judging import changes_under, evaluator_paths, prewarm
from workers.leases import Held
from workers.outcome import read as read_outcome
from workers.report import RunReport
from workers.version import MISSING, ask

# An agent whose budget ran out is told so by the proxy; it may use this long to end by itself (seconds).
LIMIT_GRACE = 5.0
# Bytes of the agent's last output that its adapter judges: CLIs write their events there, a whole turn in each.
OUTPUT_LIMIT = 1 << 20


def run(ctx: Context, session_id: str) -> None:
    s = ctx.store.begin(session_id, "run", ctx.node, ctx.worker, ctx.settings.lease_seconds)
    if s is None:
        return
    sandbox: Sandbox | None = None
    paths: list[str] = []  # what is kept of the agent's files, once it ran
    with ctx.held(s) as held, ctx.folder() as folder:
        log = folder / "agent.log"
        try:
            ctx.persist(held, lambda: dispatch(ctx))  # the READY place is free again
            task = ctx.persist(held, lambda: ctx.store.task(s.task_id))
            ref = unpack(s.sandbox, SandboxRef)
            sandbox = ctx.runtime(ref.backend).attach(ref)
            report = _attempt(ctx, s, task, sandbox, held, log, paths)
            discard(sandbox)
            sandbox = None
            if held.lost.is_set():
                return
            packed = pack(report)
            ctx.persist(held, lambda: ctx.store.advance(s, "POSTRUN", run_report=packed))
        except LeaseLost:
            if sandbox:
                discard(sandbox)
            ctx.capture.revoke(s.attempt_id)
            return
        except Exception as e:
            kept: list[Artifact] = []
            if sandbox:
                if not (held.lost.is_set() or held.cancel.is_set() or ctx.stopping.is_set()):
                    kept = salvage(ctx.objects, sandbox, s, log, paths, folder, ctx.settings.artifact_limit_bytes)
                discard(sandbox)
            error = as_error(e, "run")
            ctx.persist(held, lambda: fail_attempt(ctx, s, error, artifacts=kept))
            ctx.capture.revoke(s.attempt_id)  # also where the answer was lost, and a repetition found it over
            return
    queue = queue_for("postrun", ctx.node if report.prewarmed else "")
    send(ctx.app, [Hint(queue, "postrun", session_id)])


def _attempt(
    ctx: Context, s: Session, task: TaskRequest, sandbox: Sandbox, held: Held, log: Path, paths: list[str]
) -> RunReport:
    adapter = load_adapter(task.agent)
    budget = _budget(s, task)
    warm = prewarm(ctx, s, task)
    endpoint = ctx.persist(held, lambda: _endpoint(ctx, s, task, sandbox, budget))
    plan = adapter.plan(task.agent, task.instruction, endpoint)
    try:
        watch = _Watch(ctx, s, held)
        env = {**task.agent.env, **plan.env}
        # Before its files are written, and without the capability: whatever the program does now, it reaches no model.
        harmless = {k: v for k, v in env.items() if endpoint.api_key not in v}
        asked = time.monotonic()
        version = ask(sandbox, adapter.name, plan, harmless, budget, watch)
        budget = _budget(s, task, time.monotonic() - asked)
        for f in plan.files:
            sandbox.write(f.path, f.content.encode(), mode=f.mode)
        paths += [*task.artifacts, *plan.artifacts, *evaluator_paths(task)]
        result = sandbox.exec(
            plan.argv,
            env=env,
            cwd=plan.cwd,
            stdin=plan.stdin.encode() if plan.stdin is not None else None,
            timeout=budget,
            log=log,
            log_limit=LOG_LIMIT,
            output_limit=OUTPUT_LIMIT,
            cancelled=watch,
        )
        # The order matters: no process of the agent is left when its capability ends and its files are read.
        sandbox.stop()
        ctx.persist(held, lambda: ctx.capture.revoke(s.attempt_id))
        uncaptured = ctx.persist(held, lambda: ctx.capture.drain(s.attempt_id, ctx.settings.drain_seconds))
        report = ctx.persist(held, lambda: _judge_end(ctx, s, adapter, result, held, uncaptured))
        report.uncaptured = uncaptured
        report.notes |= version
        limit = ctx.settings.artifact_limit_bytes
        report.collected, report.artifacts = collect(ctx.objects, sandbox, s, paths, log.parent, limit)
        if (under := changes_under(task)) is not None:
            report.changes = keep_changes(ctx.objects, sandbox, s, under, log.parent, limit)
        report.artifacts += keep_log(ctx.objects, s, log.name, log, result.output_bytes)
        report.prewarmed = warm.take()
        return report
    finally:
        warm.discard()


def _budget(s: Session, task: TaskRequest, spent: float = 0.0) -> float:
    """Seconds that RUN may take: what INIT, and what was `spent` since, left of the shared budget; and the agent's own bound."""
    used = max(0.0, s.ready_at - s.init_started) + spent
    left = task.timeout_seconds - used
    if task.agent_timeout_seconds:
        left = min(left, task.agent_timeout_seconds)
    if left <= 0:
        raise InfraError("preparation used the whole time budget", code="prepare_failed", stage="init")
    return left


def _endpoint(ctx: Context, s: Session, task: TaskRequest, sandbox: Sandbox, budget: float) -> Endpoint:
    grant = Grant.of(task, s.session_id, s.attempt, ctx.capture.now() + budget + 60)
    capability = ctx.capture.mint(grant)
    models = ctx.settings.models
    context = ctx.settings.model(task.agent.model_name)[1].context_length if models else 32768
    base = f"{sandbox.ref.proxy_url}/s/{capability}"
    return Endpoint(base_url=base, api_key=capability, model=task.agent.model_name, context_length=context)


class _Watch:
    """Polled while the agent runs: true when it must end before its deadline."""

    def __init__(self, ctx: Context, s: Session, held: Held):
        self.ctx, self.s, self.held = ctx, s, held
        self.limit_since: float | None = None
        self._next = 0.0

    def __call__(self) -> bool:
        if self.held.lost.is_set() or self.held.cancel.is_set() or self.ctx.stopping.is_set():
            return True
        now = time.monotonic()
        if now >= self._next:
            self._next = now + 1.0
            try:
                limit = self.ctx.capture.usage(self.s.attempt_id)[1]
            except Exception:  # Redis away: the lease decides
                limit = ""
            if limit and self.limit_since is None:
                self.limit_since = now
        return self.limit_since is not None and now - self.limit_since > LIMIT_GRACE


def _judge_end(
    ctx: Context, s: Session, adapter: HarnessAdapter, result: ExecResult, held: Held, uncaptured: int
) -> RunReport:
    if held.lost.is_set():
        raise LeaseLost(s.session_id)
    if held.cancel.is_set():
        return RunReport(termination="cancelled", exit_code=result.exit_code)
    if result.cancelled and ctx.stopping.is_set():
        raise Shutdown("the worker was stopped while the agent ran")
    usage, limit = ctx.capture.usage(s.attempt_id)
    outcome = read_outcome(adapter, result)
    report = RunReport(
        termination=outcome.termination, message=outcome.message, exit_code=result.exit_code, notes=outcome.notes
    )
    if limit:
        report.termination = limit  # type: ignore[assignment]
    elif result.timed_out:
        report.termination, report.message = "agent_timeout", f"stopped after {result.seconds:.0f} s"
    if not limit and report.termination != "finished":
        # Whatever the CLI says of it: nothing was answered after the model failed.
        notes = ctx.capture.notes(s.attempt_id)
        if "infra" in notes:
            message = f"the agent failed after the model did: {notes['infra']}"
            raise InfraError(message, code="engine_unavailable", stage="run")
        if uncaptured and report.termination == "agent_error":
            raise InfraError(
                f"the agent failed with {uncaptured} of its calls lost in a proxy", code="proxy_lost", stage="run"
            )
        if "context_overflow" in notes and report.termination == "agent_error":
            report.termination, report.message = "context_overflow", notes["context_overflow"]
    if not usage.turns and getattr(adapter, "requires_completions", True):
        missing = result.exit_code in MISSING  # of an adapter that has no `version_argv`
        ended = f"ended (exit code {result.exit_code})"
        if result.timed_out:
            ended = f"was stopped at its time limit ({result.seconds:.0f} s)"
        raise InfraError(
            f"the agent {ended} without a model call: {_tail(result)}",
            code="harness_missing" if missing else "no_completions",
            stage="run",
            retryable=not missing,
        )
    return report


def _tail(result: ExecResult) -> str:
    return " ".join(result.output.decode("utf-8", "replace").split())[-300:] or "no output"
