"""`python -m workers STAGE…`: one worker process for one or more stages of one node."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import threading
import time

from celery import signals
from redis.exceptions import RedisError

from polar import descriptors
from polar.config import load
from polar.errors import InvalidConfig, PolarError
from workers import cleanup as cleaning
from workers.app import TASKS, queue_for
from workers.context import Context
from workers.reaper import reap_forever

STAGES = ("init", "run", "postrun", "reaper")
# Threads per stage when --slots is not given. They wait on sandboxes and evaluations, not on the CPU.
DEFAULT_SLOTS = {"init": 4, "run": 16, "postrun": 4}
BEAT_SECONDS = 2.0
SWEEP_SECONDS = 30.0


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    descriptors.raise_limit()  # each session takes some, and each connection of its agent to the proxy two
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = load(args.config)
        if not settings.broker:
            raise InvalidConfig("broker: not set; give POLAR_BROKER or a line in polar.toml")
        if not settings.proxy_url and {"init", "run"} & set(args.stages):
            # Also with a socket: sandboxes that share the node's network are told this URL.
            raise InvalidConfig(
                "proxy_url: not set, so agents on this node could not reach a model; give POLAR_PROXY_URL (the node's own "
                "'polar proxy', such as http://127.0.0.1:8100) or a line in polar.toml"
            )
        ctx = Context(settings, args.node)
        ctx.store.redis.ping()
    except PolarError as e:
        print(f"polar: {e.message}", file=sys.stderr)
        return 2
    except RedisError as e:  # whoever supervises it starts it again
        print(f"polar: broker or store: {e}; is it running? try 'polar doctor'", file=sys.stderr)
        return 3
    signal.signal(signal.SIGTERM, lambda *_: ctx.stopping.set())
    signal.signal(signal.SIGINT, lambda *_: ctx.stopping.set())
    if args.stages == ["reaper"]:
        reap_forever(ctx)
        return 0
    return _serve(ctx, args)


def _serve(ctx: Context, args: argparse.Namespace) -> int:
    register(ctx)
    slots = sum(
        args.slots if args.slots and len(args.stages) == 1 else DEFAULT_SLOTS[s] for s in args.stages if s != "reaper"
    )
    queues = [q for stage in args.stages for q in _queues(stage, args.node)]
    # The pool has stopped taking messages by then; stages that run see it and give their sessions back.
    signals.worker_shutting_down.connect(lambda **_: ctx.stopping.set(), weak=False)
    if "run" in args.stages:
        run_slots = args.slots or DEFAULT_SLOTS["run"]
        threading.Thread(target=_beat, args=(ctx, run_slots), name="beat", daemon=True).start()
    if "init" in args.stages:
        threading.Thread(target=_sweep, args=(ctx,), name="sweep", daemon=True).start()
    if "reaper" in args.stages:
        threading.Thread(target=reap_forever, args=(ctx,), name="reaper", daemon=True).start()
    worker = ctx.app.Worker(
        pool="threads",
        concurrency=slots,
        queues=queues,
        hostname=f"{'-'.join(args.stages)}@{args.node}.{socket.gethostname()}.{os.getpid()}",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel=args.log_level.upper(),
        quiet=True,
    )
    try:
        worker.start()
    finally:
        ctx.stopping.set()
        ctx.warm.close()
    return worker.exitcode or 0


def register(ctx: Context) -> None:
    """The four Celery tasks, bound to this process's context."""
    from workers.init import init
    from workers.postrun import postrun
    from workers.run import run

    for stage, function in {"init": init, "run": run, "postrun": postrun, "cleanup": cleaning.cleanup_attempt}.items():

        def body(session_id: str, _f=function) -> None:
            _f(ctx, session_id)

        ctx.app.task(body, name=TASKS[stage])


def _queues(stage: str, node: str) -> list[str]:
    if stage == "postrun":
        return [queue_for("postrun"), queue_for("postrun", node)]
    if stage == "init":
        return [queue_for("init", node), queue_for("cleanup", node)]
    return [queue_for(stage, node)] if stage == "run" else []


def _beat(ctx: Context, slots: int) -> None:
    """The node's sign of life: without it nothing is admitted here."""
    backends: list[str] = []
    checked = 0.0
    while not ctx.stopping.is_set():
        try:
            if time.monotonic() - checked > 30 or not backends:
                backends, checked = cleaning.backends(ctx), time.monotonic()
            known = ctx.lively.redis.sismember(ctx.keys.nodes, ctx.node)
            ctx.lively.node_beat(ctx.node, ctx.settings.ready_places, slots, backends)
            if not known:
                ctx.lively.ring()
        except Exception as e:
            logging.getLogger("polar.beat").warning("%s", e)
        ctx.stopping.wait(BEAT_SECONDS)


def _sweep(ctx: Context) -> None:
    while not ctx.stopping.is_set():
        try:
            cleaning.sweep(ctx)
        except Exception as e:
            logging.getLogger("polar.cleanup").warning("sweep: %s", e)
        ctx.stopping.wait(SWEEP_SECONDS)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    p.add_argument("stages", nargs="+", choices=STAGES)
    p.add_argument("--node", default=socket.gethostname())
    p.add_argument("--slots", type=int, help="how many sessions this process works on at once")
    p.add_argument("--config")
    p.add_argument("--log-level", default="info")
    args = p.parse_args(argv)
    if args.slots is not None and args.slots < 1:
        p.error(f"--slots: found {args.slots}, allowed is 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
