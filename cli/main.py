"""The `polar` command."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated

import redis.exceptions
import typer

from cli import datasets, images, results, session, tasks, transcript
from cli import doctor as doctor_command
from cli.common import BAD, EXIT_BY_CODE, INTERRUPTED, UNAVAILABLE, complain, err
from cli.processes import replace_by
from polar.errors import PolarError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich",
                  help="Reinforcement learning rollouts inside the agent harness that will use the model.")  # fmt: skip
app.add_typer(images.app, name="images", help="Agent CLIs as bundles to mount, and as sandbox images.")
transcript.add_to(results.app)
app.add_typer(results.app, name="results", help="Look at and pull results.")
app.add_typer(datasets.app, name="tasks", help="Task files from data sets: SWE-bench, SWE-Gym, SWE-smith, Harbor.")
app.add_typer(session.app, name="session", help="Capture-only sessions: you run the agent, Polar records it.")
for command in (tasks.submit, tasks.run, tasks.status, tasks.cancel):
    app.command()(command)
app.command()(doctor_command.doctor)

Config = Annotated[str | None, typer.Option("--config", help="Settings file (default: $POLAR_CONFIG, ./polar.toml).")]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")]
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.command()
def demo(
    config: Config = None,
    runtime: Annotated[str | None, typer.Option(help="Sandbox back-end: local, docker, …")] = None,
    samples: Annotated[int, typer.Option(min=1, max=64, help="Samples per task.")] = 4,
    slots: Annotated[int, typer.Option(min=1, help="Agents that run at once.")] = 8,
    model: Annotated[str, typer.Option(help="Model of the embedded engine: a name it knows, or a folder.")] = "",
    data_dir: Annotated[Path | None, typer.Option(help="Where all data of the stack goes (default .polar).")] = None,
    as_json: Json = False,
) -> None:
    """Run the quickstart batch on an embedded stack: broker, engine, proxy, workers; then stop it all."""
    from cli.demo import demo as run_demo

    s = settings_without_stack(config, data_dir)
    raise typer.Exit(run_demo(s, runtime=runtime, slots=slots, model=model, samples=samples, as_json=as_json))


@app.command()
def up(
    config: Config = None,
    slots: Annotated[int, typer.Option(min=1)] = 8,
    node: Annotated[str, typer.Option(help="Name of this node (default: from the data folder).")] = "",
    model: Annotated[str, typer.Option(help="Model of the embedded engine.")] = "",
    data_dir: Annotated[Path | None, typer.Option(help="Where all data of the stack goes (default .polar).")] = None,
) -> None:
    """Keep a stack running on this machine until Ctrl-C. What the settings name is used, the rest is embedded."""
    from cli.up import up as run_up

    raise typer.Exit(run_up(settings_without_stack(config, data_dir), node=node, slots=slots, model=model))


@app.command(context_settings=PASS_ON)
def worker(ctx: typer.Context) -> None:
    """Run workers: polar worker STAGE… [--node NAME] [--slots N] with STAGE in init, run, postrun, reaper."""
    replace_by("workers", ctx.args)


@app.command(context_settings=PASS_ON)
def proxy(ctx: typer.Context) -> None:
    """Run the model proxy: polar proxy [--host --port --socket --admin-port]."""
    replace_by("proxy", ctx.args)


@app.command(context_settings=PASS_ON)
def api(ctx: typer.Context) -> None:
    """Run the control plane: polar api [--host --port]."""
    replace_by("api", ctx.args)


@app.command(context_settings=PASS_ON)
def engine(ctx: typer.Context) -> None:
    """Run the embedded inference engine: polar engine --model NAME [--host --port]."""
    replace_by("engine", ctx.args)


def settings_without_stack(config: str | None, data_dir: Path | None):
    """For commands that start a stack: the settings of one that ran here before must not be taken for its own."""
    from polar.config import load

    return load(config, data_dir=str(data_dir) if data_dir else None) if config or data_dir else load()


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        # Not standalone: typer then returns the code of an Exit, 130 for Ctrl-C.
        code = app(standalone_mode=False) or 0
        if code == INTERRUPTED:
            err.print("interrupted")
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        err.print("interrupted")
        sys.exit(INTERRUPTED)
    except PolarError as e:
        complain(e.message)
        sys.exit(EXIT_BY_CODE.get(e.code, BAD))
    except redis.exceptions.RedisError as e:
        complain(f"broker or store: {e}; is it running? try 'polar doctor'")
        sys.exit(UNAVAILABLE)
    except Exception as e:
        if hasattr(e, "exit_code") and hasattr(e, "format_message"):  # a usage error of the command line
            complain(e.format_message())
            sys.exit(e.exit_code)
        raise


if __name__ == "__main__":
    main()
