"""How fast an attempt is rebuilt: `python -m benchmarks.rebuild [--json] [--turns N] [--tokens N]`.

An append-only session as a capture holds it (each prompt: its parent's sequence and a new tail), rebuilt by `exact`.
Control: the paper's algorithm (Eq. 5-9) as it reads, on whole prompts in lists, which is what a capture of requests gives.
`ms` and `naive_ms` are the best of several runs, without decoding. `slope_ratio_8_to_512` is milliseconds per token at 512
turns over those at 8 (at most 1: linear, and what is fixed gets shared); `exponent` is the fit of ms ~ tokens^exponent over
8…512 turns. `peak_over_output`: the most memory held while building over the bytes of the traces' arrays.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from polar.completion import Completion, VersionSpan, resolve_prompts
from polar.trace import Trajectory
from reconstruction import exact, per_request

EOT = 2
SAMPLED, FIRST = 120, 2000  # tokens of a response, of the first prompt


def session(turns: int, tokens: int) -> list[Completion]:
    """`turns` calls with `tokens` tokens in all, in the capture's own encoding."""
    rng = np.random.default_rng(turns)
    first = min(FIRST, tokens // 4)
    tool = max(1, (tokens - first - turns * SAMPLED) // max(1, turns - 1))
    out: list[Completion] = []
    shared = 0
    for n in range(turns):
        tail = rng.integers(3, 50_000, first if n == 0 else tool).astype("<i4")
        sampled = np.append(rng.integers(3, 50_000, SAMPLED - 1), EOT).astype("<i4")
        out.append(
            Completion(
                completion_id=f"c{n}",
                session_id="bench.s0",
                attempt=1,
                index=n,
                parent_id=f"c{n - 1}" if n else None,
                link="continued" if n else "first",
                prompt_shared=shared,
                prompt_tail=tail,
                sampled_ids=sampled,
                logprobs=rng.normal(-1, 0.3, SAMPLED).astype("<f4"),
                versions=[VersionSpan(str(n // 16), 0, SAMPLED)],
            )
        )
        shared += len(tail) + SAMPLED
    return out


def naive(requests: list[tuple[list[int], list[int], list[float]]]) -> list[tuple[list[int], list[int], list[float]]]:
    """The paper's prefix merging, read literally: group by prompt prefix (Eq. 5-6), then per group take the canonical tail
    up to its first end-of-turn for the previous response and keep the raw sample instead (Eq. 7-9)."""
    chains: list[list[tuple[list[int], list[int], list[float]]]] = []
    for request in requests:
        prompt = request[0]
        open_ = [c for c in chains if len(c[-1][0]) < len(prompt) and prompt[: len(c[-1][0])] == c[-1][0]]
        best = max(open_, key=lambda c: len(c[-1][0]), default=None)
        if best is None:
            chains.append([request])
        else:
            best.append(request)
    out = []
    for chain in chains:
        prompt, raw, logprobs = chain[0]
        z, mask, values = prompt + raw, [0] * len(prompt) + [1] * len(raw), [0.0] * len(prompt) + logprobs
        for (before, said, _), (after, raw, logprobs) in itertools.pairwise(chain):
            tail = after[len(before) :]
            end = tail.index(EOT)
            between = tail[end + 1 :] if said[-1] == EOT else tail[end:]
            z = z + between + raw
            mask = mask + [0] * len(between) + [1] * len(raw)
            values = values + [0.0] * len(between) + logprobs
        out.append((z, mask, values))
    return out


def best(work: Callable[[], Any], repeat: int) -> float:
    """Milliseconds of the fastest run: the others say more of the machine's other work."""
    work()
    times = []
    gc.collect()
    for _ in range(repeat):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1000 * min(times)


def as_requests(completions: list[Completion]) -> list[tuple[list[int], list[int], list[float]]]:
    prompts = resolve_prompts(completions)
    return [(prompts[c.completion_id].tolist(), c.sampled_ids.tolist(), c.logprobs.tolist()) for c in completions]


def size(out: Trajectory) -> int:
    return sum(t.prompt_ids.nbytes + t.response_ids.nbytes + t.loss_mask.nbytes + t.logprobs.nbytes for t in out.traces)


def peak_over_output(completions: list[Completion]) -> float:
    gc.collect()
    tracemalloc.start()
    out = exact.build(completions, {})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / size(out)


def measure(turns: int, tokens: int, repeat: int = 20) -> dict[str, float]:
    completions = session(turns, tokens)
    out = exact.build(completions, {})
    requests = as_requests(completions)
    control = naive(requests)
    if [z for z, _, _ in control] != [[*t.prompt_ids.tolist(), *t.response_ids.tolist()] for t in out.traces]:
        raise RuntimeError("the control gives other traces than the builder")
    points = {n: session(n, n * tokens // turns) for n in (8, 16, 32, 64, 128, 256, 512)}
    sizes = {n: _tokens(exact.build(c, {})) for n, c in points.items()}
    taken = {n: best(lambda c=c: exact.build(c, {}), max(5, repeat)) for n, c in points.items()}  # type: ignore[misc]
    exponent = np.polyfit(np.log([sizes[n] for n in points]), np.log([taken[n] for n in points]), 1)[0]
    return {
        "turns": turns,
        "tokens": _tokens(out),
        "ms": round(best(lambda: exact.build(completions, {}), repeat), 3),
        "naive_ms": round(best(lambda: naive(requests), max(2, repeat // 5)), 3),
        "traces": len(out.traces),
        "per_request_traces": len(per_request.build(completions, {}).traces),
        "slope_ratio_8_to_512": round((taken[512] / sizes[512]) / (taken[8] / sizes[8]), 3),
        "exponent": round(float(exponent), 3),
        "peak_over_output": round(peak_over_output(completions), 3),
    }


def _tokens(out: Trajectory) -> int:
    return out.fidelity.stored_tokens


def main() -> None:
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    cli.add_argument("--turns", type=int, default=128)
    cli.add_argument("--tokens", type=int, default=70_000)
    cli.add_argument("--repeat", type=int, default=20)
    options = cli.parse_args()
    result = measure(options.turns, options.tokens, options.repeat)
    if options.json:
        print(json.dumps(result))
    else:
        print("\n".join(f"{k:22} {v}" for k, v in result.items()))


if __name__ == "__main__":
    main()
