"""session open, close: for people who run their agent themselves."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.common import bound, deployment, err, out, print_json
from cli.results import of_session
from polar.ids import new_id
from polar.store.capture import CaptureStore
from polar.task import AgentSpec, BuilderSpec, TaskRequest
from submission import capture_only

app = typer.Typer(no_args_is_help=True)
Config = Annotated[str | None, typer.Option("--config")]
Json = Annotated[bool, typer.Option("--json", help="One line of JSON on stdout.")]


@app.command("open")
def open_(
    config: Config = None,
    model: Annotated[str, typer.Option(help="Row of the model table.")] = "policy",
    timeout: Annotated[
        float, typer.Option(min=1, max=bound("timeout_seconds"), help="Seconds until the session closes by itself.")
    ] = 3600,
    builder: str = "exact",
    as_json: Json = False,
) -> None:
    """Open a session and print the base URL and key to give to your agent."""
    settings, store, _ = deployment(config)
    task = TaskRequest(
        task_id=new_id("capture"),
        instruction="capture only",
        timeout_seconds=timeout,
        agent=AgentSpec(harness="shell", command="true", model_name=model),
        builder=BuilderSpec(strategy=builder),
    )
    s, base_url, key = capture_only.open(store, CaptureStore(store.redis, store.keys), settings, task)
    if as_json:
        return print_json({"session": s.session_id, "base_url": base_url, "api_key": key})
    out.print(f"session {s.session_id}")
    out.print(f"export OPENAI_BASE_URL={base_url}/v1\nexport OPENAI_API_KEY={key}", soft_wrap=True)
    err.print(f"close it with: polar session close {s.session_id}", style="dim", soft_wrap=True)
    return None


@app.command()
def close(
    session: str, config: Config = None, wait: Annotated[float, typer.Option()] = 60, as_json: Json = False
) -> None:
    """Close a session, wait for its result, and show it."""
    _, store, _ = deployment(config)
    s = store.session(session)
    capture_only.close(store, session)
    if not store.wait([s.task_id], wait):
        err.print(f"closed; the result is not there after {wait:g} s (is a postrun worker running?)")
        raise typer.Exit(1)
    _, r = of_session(config, None, session)
    if as_json:
        return print_json(r)
    f = r.trajectory.fidelity
    out.print(f"{session}: {r.usage.turns} turns, {f.sampled_tokens} tokens sampled, {len(r.trajectory.traces)} traces")
    out.print(f"result {store.session(session).result}", soft_wrap=True)
    return None
