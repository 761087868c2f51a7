"""The control of `benchmarks.pipeline`: three empty tasks, each sent by the one before it, on a queue per hop."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from celery import Celery

from polar.config import Settings, load
from polar.store.connection import connect
from workers.app import make_app

HOPS = 3


@cache
def _app(broker: str) -> Celery:
    return make_app(Settings(broker=broker))


def start_chain(settings: Settings, _redis: Any, names: list[str]) -> None:
    app = _app(settings.broker)
    for name in names:
        app.send_task("chain.0", args=[name], queue="chain.0")


def main() -> None:
    settings, hop = load(sys.argv[1]), int(sys.argv[2])
    app = _app(settings.broker)
    redis = connect(settings.broker)

    def step(name: str) -> None:
        if hop + 1 < HOPS:
            app.send_task(f"chain.{hop + 1}", args=[name], queue=f"chain.{hop + 1}")
        else:
            redis.lpush(f"chain:{name}", "1")

    app.task(step, name=f"chain.{hop}")
    app.Worker(pool="threads", concurrency=4, queues=[f"chain.{hop}"], without_gossip=True, without_mingle=True,
               without_heartbeat=True, quiet=True, loglevel="WARNING").start()  # fmt: skip


if __name__ == "__main__":
    main()
