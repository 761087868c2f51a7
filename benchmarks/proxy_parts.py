"""The measurements: latency at a fixed rate, throughput, many streams at once, memory over many calls."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time

from benchmarks.proxy_driver import Answer, Target
from benchmarks.proxy_rig import Process, histogram, mint, quantile
from benchmarks.proxy_talk import Conversation
from polar.ids import attempt_id
from polar.store.capture import CaptureStore

TURNS = 16  # of a conversation, before a new one begins
SESSIONS = 8  # at once
_numbers = itertools.count()


class Failures:
    """Calls that were not answered whole; the first few are shown."""

    def __init__(self) -> None:
        self.count = 0

    def check(self, who: str, answer: Answer) -> bool:
        if not answer.ok:
            self.count += 1
            if self.count <= 3:
                print(f"failed ({who}): {answer.said!r}", file=sys.stderr)
        return answer.ok


class Agent:
    """One conversation after another, each a session of its own at the proxy. An ended one is closed and forgotten at once
    if nothing of it can still be in flight (`waits`), else with the last."""

    def __init__(self, captures: CaptureStore, size: int, turns: int = TURNS, waits: bool = True):
        self._captures, self._size, self._turns, self._waits = captures, size, turns, waits
        self._sessions: list[str] = []
        self._begin()

    def _begin(self) -> None:
        if self._waits:
            self.end()
        self.talk = Conversation(self._size, self._turns)
        self._sessions.append(f"bench.s{next(_numbers)}")
        self.prefix = mint(self._captures, self._sessions[-1])

    def end(self) -> None:
        while self._sessions:
            attempt = attempt_id(self._sessions.pop(), 1)
            self._captures.revoke(attempt)
            self._captures.forget(attempt)

    def body(self) -> list[bytes]:
        if self.talk.turns == self._turns:
            self._begin()
        return self.talk.body()


async def latency(
    targets: dict[str, Target], captures: CaptureStore, size: int, rate: float, calls: int, failures: Failures
) -> dict[str, dict[str, list[float]]]:
    """An open loop: every 1/rate seconds the next turn of some conversation goes to each target, in changing order, spread
    over the interval, whether or not earlier ones were answered. Seconds by target and kind: `turn`, `ttfb` (the first byte
    of the body) and `first` (the first turn of a conversation, whose prompt nobody has seen)."""
    out: dict[str, dict[str, list[float]]] = {t: {"turn": [], "ttfb": [], "first": []} for t in targets}
    agents = [Agent(captures, size, waits=False) for _ in range(SESSIONS)]
    names = list(targets)
    running: set[asyncio.Task] = set()

    async def one(name: str, at: float, body: list[bytes], prefix: str, kind: str) -> None:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        answer = await targets[name].send(body, prefix if name == "polar" else "")
        if failures.check(name, answer) and kind:
            out[name][kind].append(answer.whole)
            if kind == "turn":
                out[name]["ttfb"].append(answer.first)

    begun = time.perf_counter() + 0.1
    warm = 2 * SESSIONS + int(rate)
    for i in range(-warm, calls):
        agent = agents[i % SESSIONS]
        body = agent.body()
        kind = "" if i < 0 else "first" if agent.talk.turns == 1 else "turn"
        tick = begun + (i + warm) / rate
        for k in range(len(names)):
            name = names[(i + k) % len(names)]
            task = asyncio.create_task(one(name, tick + k / rate / len(names), body, agent.prefix, kind))
            running.add(task)
            task.add_done_callback(running.discard)
        await asyncio.sleep(max(0.0, tick - time.perf_counter()))
    await asyncio.gather(*running)
    for agent in agents:
        agent.end()
    return out


async def throughput(
    who: str, target: Target, process: Process, captures: CaptureStore, size: int, seconds: float, failures: Failures
) -> tuple[float, float]:
    """Calls per second that 16 sessions at once get, and what one costs the process in milliseconds of processor time."""
    until = time.perf_counter() + seconds
    done = 0

    async def session() -> None:
        nonlocal done
        agent = Agent(captures, size)
        while time.perf_counter() < until:
            body = agent.body()
            failures.check(f"throughput of {who}", await target.send(body, agent.prefix if who == "polar" else ""))
            done += 1
        agent.end()

    begun, cpu = time.perf_counter(), process.cpu()
    await asyncio.gather(*(session() for _ in range(16)))
    return done / (time.perf_counter() - begun), 1000 * (process.cpu() - cpu) / done


async def streams(
    target: Target, admin: str, captures: CaptureStore, count: int, ramp: float, failures: Failures
) -> float:
    """`count` paced streams at once, begun within `ramp` seconds; returns the proxy's loop lag, p99, in milliseconds."""
    before = await asyncio.to_thread(histogram, admin, "polar_proxy_loop_lag_seconds")

    async def one(i: int) -> None:
        await asyncio.sleep(ramp * i / count)
        body = Conversation(8192, 1, "paced").body()
        prefix = await asyncio.to_thread(mint, captures, f"stream.s{next(_numbers)}")
        failures.check("streams", await target.send(body, prefix))

    await asyncio.gather(*(one(i) for i in range(count)))
    after = await asyncio.to_thread(histogram, admin, "polar_proxy_loop_lag_seconds")
    return 1000 * quantile(before, after, 0.99)


async def soak(
    target: Target, process: Process, captures: CaptureStore, size: int, calls: int, failures: Failures
) -> float:
    """Megabytes that the process grew by over `calls` calls, the first fifth being warm-up: the difference between the
    median of the last tenth and that of the first one after the warm-up."""
    done = 0
    samples: list[float] = []

    async def session() -> None:
        nonlocal done
        agent = Agent(captures, size)
        while done < calls:
            done += 1
            if done >= calls // 5 and done % max(1, calls // 200) == 0:
                samples.append(process.rss())
            failures.check("soak", await target.send(agent.body(), agent.prefix))
        agent.end()

    await asyncio.gather(*(session() for _ in range(SESSIONS)))
    tenth = max(1, len(samples) // 10)
    return statistics.median(samples[-tenth:]) - statistics.median(samples[:tenth])
