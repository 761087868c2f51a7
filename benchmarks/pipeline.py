"""How much the pipeline costs: no-op sessions through all stages against bare Celery chains of as many hops.

Both run in one go on the same embedded Valkey (AOF always), with one worker process per hop and the same thread pools.
`sessions_per_s` and `celery_chain_per_s` are throughputs of a batch; `overhead_ms_*` is the latency of a lone session
(submission to committed result) minus the median latency of a lone chain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.celery_chain import HOPS, start_chain
from tests.workers.cluster import Cluster, noop


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.pipeline", description=__doc__)
    p.add_argument("--sessions", type=int, default=200)
    p.add_argument("--lone", type=int, default=40)
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), ready_places=16, postrun_limit=1000) as c:
        for hop in range(HOPS):
            start_worker(c, hop)
        c.workers(slots=16)
        wait_ready(c)
        chain_lone = [lone_chain(c, i) for i in range(args.lone)]
        session_lone = [lone_session(c, i) for i in range(args.lone)]
        chains = args.sessions / batch_chains(c, args.sessions)
        started = time.monotonic()
        c.wait(c.submit(noop("bench", args.sessions)), 300)
        sessions = args.sessions / (time.monotonic() - started)
    base = statistics.median(chain_lone)
    over = sorted(max(0.0, x - base) * 1000 for x in session_lone)
    line = {
        "sessions_per_s": round(sessions, 1),
        "celery_chain_per_s": round(chains, 1),
        "ratio": round(sessions / chains, 3),
        "overhead_ms_p50": round(statistics.median(over), 1),
        "overhead_ms_p99": round(over[int(len(over) * 0.99) if len(over) > 1 else 0], 1),
    }
    print(json.dumps(line) if args.json else "\n".join(f"{k}: {v}" for k, v in line.items()))
    return 0


def start_worker(c: Cluster, hop: int) -> None:
    from cli.supervisor import Process

    argv = [sys.executable, "-m", "benchmarks.celery_chain", str(c.config), str(hop)]
    c._start(Process(f"worker-chain-{hop}", argv))


def wait_ready(c: Cluster) -> None:
    lone_chain(c, -1)
    c.wait(c.submit(noop("warmup", 4)))


def lone_chain(c: Cluster, i: int) -> float:
    started = time.monotonic()
    start_chain(c.settings, c.store.redis, [f"lone{i}"])
    assert c.store.redis.blpop([f"chain:lone{i}"], timeout=30)
    return time.monotonic() - started


def lone_session(c: Cluster, i: int) -> float:
    started = time.monotonic()
    (task,) = c.submit(noop(f"lone{i}"))
    assert c.store.wait([task], 30, poll=0.001)
    return time.monotonic() - started


def batch_chains(c: Cluster, n: int) -> float:
    started = time.monotonic()
    names = [f"b{i}" for i in range(n)]
    start_chain(c.settings, c.store.redis, names)
    for name in names:
        assert c.store.redis.blpop([f"chain:{name}"], timeout=60)
    return time.monotonic() - started


if __name__ == "__main__":
    sys.exit(main())
