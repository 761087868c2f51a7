"""`polar demo`: the whole pipeline on this machine, once, with real parts and a real (small) model."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from cli.common import BAD, OK, err, out, print_json
from cli.progress import stage_table, task_table, watch
from cli.stack import EMBEDDED_MODEL, Stack, interruptible
from cli.summary import Summary, summarize
from examples.quickstart.batch import quickstart
from polar.client import ResultsConsumer
from polar.config import Settings
from polar.errors import PolarError
from polar.export import rows
from polar.objects import open_objects
from polar.result import SessionResult
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.store.sessions import SessionStore
from submission import submit


def demo(settings: Settings, *, runtime: str | None, slots: int, model: str, samples: int, as_json: bool) -> int:
    started = time.monotonic()
    changes: dict[str, Any] = {"data_dir": str(Path(settings.data_dir) / "demo")}
    if runtime:
        changes["default_runtime"] = runtime
    settings = msgspec.structs.replace(settings, **changes)
    # The demo counts its own batch, so it starts with an empty store.
    stack = Stack(settings, slots=slots, model=model or EMBEDDED_MODEL, fresh=True)
    interruptible()

    def say(text: str) -> None:
        err.print(f"· {text}", style="dim", soft_wrap=True)

    try:
        settings = stack.start(say)
        store = SessionStore(connect(settings.store_url), Keys(settings.namespace))
        objects = open_objects(settings.objects_url)
        for part, what in stack.used.items():
            say(f"{part}: {what}")
        tasks = quickstart(samples, settings.default_runtime)
        ids = list(submit(tasks, store, objects, settings, base=Path.cwd()))
        say(f"submitted {len(ids)} tasks x {samples} samples")
        watch(store, ids, err, live=err.is_terminal, check=lambda: stack.supervisor.failed)
        results = pull(settings, tasks[0].results_queue, samples * len(ids))
        summary = summarize(results)
        sampled, why = engine_count(stack)
        if why:
            say(f"the engine's own count is not used: {why}; judged by what the proxy captured")
    finally:
        stack.stop()
    seconds = time.monotonic() - started
    line = {
        "sessions": summary.sessions,
        "passed": summary.passed,
        "failed": summary.failed,
        "errors": summary.errors,
        "engine_tokens": sampled,  # none: not known
        "trace_tokens": summary.trace_tokens,
        "unaccounted_tokens": (captured(summary) if sampled is None else sampled) - summary.accounted,
        "seconds": round(seconds, 1),
        "results": f"{settings.objects_url.split('?')[0]}/results",
    }
    if as_json:
        print_json(line)
    else:
        _tables(results, summary, line)
    return OK if not summary.errors and not line["unaccounted_tokens"] else BAD


def _tables(results, summary: Summary, line: dict[str, Any]) -> None:
    out.print(task_table(results))
    out.print(stage_table(summary))
    judged = summary.passed + summary.failed
    out.print(
        f"{summary.sessions} sessions: {summary.passed} passed, {summary.failed} failed, "
        f"{summary.errors} errors; pass rate {summary.passed / judged:.0%}" if judged else f"{summary.sessions} sessions"
    )  # fmt: skip
    known = line["engine_tokens"] is not None
    out.print(
        f"{line['engine_tokens'] if known else captured(summary)} tokens "
        f"{'sampled by the engine' if known else 'captured by the proxy'} = {summary.trace_tokens} in {summary.traces} traces "
        f"({summary.exact_tokens} in their exact context) + {sum(summary.left_out.values())} left out "
        f"{summary.left_out or ''} + {line['unaccounted_tokens']} unaccounted; "
        f"{summary.completions} completions, {summary.turns} turns"
    )
    out.print(f"{line['seconds']} s; results: {line['results']}", soft_wrap=True)
    url = str(line["results"]).removesuffix("/results")
    out.print(
        f"look at them: polar results list --objects {url}   keep a stack running: polar up",
        style="dim",
        soft_wrap=True,
    )


def pull(settings: Settings, queue: str, expected: int) -> list[SessionResult]:
    """The batch as a trainer gets it: each result once from the results queue, its arrays checked, acknowledged."""
    results: dict[str, SessionResult] = {}
    with ResultsConsumer(
        settings.store_url,
        settings.objects_url,
        namespace=settings.namespace,
        queue=queue,
        group="demo",
        block_seconds=30,
    ) as consumer:
        for delivery in consumer:
            for trace in rows(delivery.result.trajectory):
                trace.check()
            results[delivery.result.session_id] = delivery.result
            delivery.ack()
            if len(results) == expected:
                break
    if len(results) < expected:
        raise PolarError(f"the results queue gave {len(results)} of {expected} results", code="stack_failed")
    return [results[k] for k in sorted(results)]


def captured(summary: Summary) -> int:
    """Tokens by the proxy's count, failed attempts included."""
    return summary.sampled_tokens + summary.left_out.get("failed_attempt", 0)


def engine_count(stack: Stack) -> tuple[int | None, str]:
    """What the engine itself says it sampled for the batch; none, and why, where that can't be known."""
    if stack.base.models:
        return None, "the engine is yours, and others may use it"
    if stack.base.broker:
        return None, "the broker is yours, and sessions of others may have used the engine"
    if any(p.started > 1 for p in stack.supervisor.processes if p.name == "engine"):
        return None, "the engine was started again, and counts from there"
    try:
        return engine_tokens(stack.settings), ""
    except OSError as e:
        return None, f"the engine doesn't tell: {e}"


def engine_tokens(settings: Settings) -> int:
    """Tokens sampled so far by the engines' own count (SGLang's `generation_tokens_total`)."""
    total = 0.0
    for url in {u for m in settings.models.values() for u in m.engines}:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            for text in reply.read().decode().splitlines():
                if text.startswith("sglang:generation_tokens_total"):
                    total += float(text.rsplit(" ", 1)[1])
    return int(total)
