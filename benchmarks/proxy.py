"""What the proxy adds to a model call: `python -m benchmarks.proxy [--json]`.

One scripted engine that answers at once; in front of it the proxy (with a real Redis), a null reverse proxy as the control,
the same with two empty round trips to that Redis (`floor_*`: no proxy that keeps the laws can do less), and on demand a
peer. `added_*_ms` are differences to the control, of percentiles of the time from sending a streaming
request to its end, for agent-like conversations at a fixed rate that all sustain; `first_turn_added_p50_ms` is the same for
first turns, whose prompt is tokenised from nothing; `ttfb` is the time to the first byte. `rps` is what 16 sessions at once
get, `cpu_ms` the processor time of one such call. `loop_lag_p99_ms` is the proxy's own measurement under `--streams` paced
streams; `rss_growth_mb` its growth over `--calls` calls; `tokenise_*` the tokenisation of a `--turns` turn session of 70,000
tokens. `failed` counts calls of any part without a whole answer. A part is left out with 0 for its number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import proxy_parts as parts
from benchmarks import proxy_peer as peer
from benchmarks.proxy_driver import Target
from benchmarks.proxy_rig import ROOT, build_tokenizer, config, module, process, said_ids, store
from benchmarks.proxy_tokens import tokenisation


def percentile(values: list[float], q: float) -> float:
    """In milliseconds."""
    return 1000 * sorted(values)[min(len(values) - 1, int(q * len(values)))] if values else float("nan")


def compared(times: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Percentiles of each target, and what they add to the control's."""

    def at(target: str, kind: str, q: float) -> float:
        return percentile(times[target][kind], q)

    out: dict[str, float] = {}
    for target in (t for t in times if t != "null"):
        mark = "" if target == "polar" else f"{target}_"
        for q in (0.5, 0.99):
            out[f"{mark}added_p{q * 100:.0f}_ms"] = at(target, "turn", q) - at("null", "turn", q)
        out[f"{mark}ttfb_added_p50_ms"] = at(target, "ttfb", 0.5) - at("null", "ttfb", 0.5)
        out[f"{mark}first_turn_added_p50_ms"] = at(target, "first", 0.5) - at("null", "first", 0.5)
        out[f"{mark}ratio_p50"] = at(target, "turn", 0.5) / at("null", "turn", 0.5)
    out["null_p50_ms"], out["null_p99_ms"] = at("null", "turn", 0.5), at("null", "turn", 0.99)
    return out


async def measure(o: argparse.Namespace) -> dict[str, Any]:
    rate = o.rate or min(4.0 if o.peer else 20.0, 20.0 * 65536 / max(1, o.body))
    out: dict[str, Any] = {"body": o.body, "rate": round(rate, 2), "fsync": o.fsync}
    failures = parts.Failures()
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pb")))
        tokenizer = await asyncio.to_thread(build_tokenizer, folder / "tokenizer")
        ids = said_ids(tokenizer)
        url, captures = stack.enter_context(store(folder, o.fsync))
        engine_args = module("benchmarks.scripted_engine", "--ids", ",".join(map(str, ids)))
        engine = await stack.enter_async_context(process(folder, "engine", *engine_args))
        null_args = module("benchmarks.null_proxy", "--target", engine.url)
        null = await stack.enter_async_context(process(folder, "null", *null_args))
        floor_args = module("benchmarks.null_proxy", "--target", engine.url, "--store", url)
        floor = await stack.enter_async_context(process(folder, "floor", *floor_args))
        settings = config(folder, url, engine.url, tokenizer)
        admin_file = folder / "admin.url"
        polar_args = ["proxy", "--config", str(settings), "--log-level", o.log_level]
        polar_args += ["--admin-port", "0", "--admin-port-file", str(admin_file)]
        polar = await stack.enter_async_context(process(folder, "polar", *module(*polar_args)))
        servers = {"null": null, "floor": floor, "polar": polar}
        targets = {name: Target(server.url) for name, server in servers.items()}
        if o.peer:
            litellm = await stack.enter_async_context(peer.litellm(folder, engine.url))
            servers["peer"] = litellm
            targets["peer"] = Target(litellm.url, headers={"Authorization": f"Bearer {peer.KEY}"})
        if o.pairs:
            out |= compared(await parts.latency(targets, captures, o.body, rate, o.pairs, failures))
        if o.seconds:
            for who, server in servers.items():
                mark = "" if who == "polar" else f"{who}_"
                load = await parts.throughput(who, targets[who], server, captures, o.body, o.seconds, failures)
                out[f"{mark}rps"], out[f"{mark}cpu_ms"] = load
        if o.streams:
            lag = parts.streams(targets["polar"], admin_file.read_text(), captures, o.streams, o.ramp, failures)
            out["loop_lag_p99_ms"] = await lag
        if o.calls:
            out["rss_growth_mb"] = await parts.soak(targets["polar"], polar, captures, o.body, o.calls, failures)
            out["rss_mb"] = polar.rss()
        for target in targets.values():
            target.close()
        if o.turns:
            out |= await tokenisation(tokenizer, ids, o.turns)
    out["failed"] = failures.count
    # A part may have had nothing to measure; JSON has no word for that.
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in out.items() if v == v}


def main() -> None:
    cli = argparse.ArgumentParser(
        prog="python -m benchmarks.proxy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cli.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    cli.add_argument("--body", type=int, default=32768, help="bytes of a request in the middle of its conversation")
    cli.add_argument("--pairs", type=int, default=600, help="calls of the latency part, to each target")
    cli.add_argument(
        "--rate",
        type=float,
        default=0.0,
        help="their rate per second (default: 20; less for large bodies, 4 with a peer)",
    )
    cli.add_argument("--seconds", type=float, default=6.0, help="length of the throughput part")
    cli.add_argument("--streams", type=int, default=1000, help="concurrent streams")
    cli.add_argument("--ramp", type=float, default=8.0, help="seconds in which they begin")
    cli.add_argument("--calls", type=int, default=2000, help="calls of the memory part")
    cli.add_argument("--turns", type=int, default=128, help="turns of the tokenised session")
    cli.add_argument("--fsync", choices=["always", "everysec"], default="everysec", help="Redis' appendfsync")
    cli.add_argument("--log-level", default="WARNING", help="the proxy's")
    cli.add_argument("--peer", choices=["litellm"], help="measured beside the proxy, in an environment of its own")
    options = cli.parse_args()
    os.chdir(ROOT)
    result = asyncio.run(measure(options))
    print(json.dumps(result) if options.json else "\n".join(f"{k:24} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
