"""A worker that dies at its N-th step, for many N, or at random moments, and the janitor after each death. Run as a program:
prints one JSON object."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from polar.codec import from_json
from polar.config import Settings
from polar.sandbox import ProxyEndpoint
from polar.task import RuntimeSpec
from runtimes import cgroups, procs
from runtimes.registry import load_runtime

ROUNDS = 3  # of the janitor after each death


def session(backend: str, settings: Settings, spec: RuntimeSpec, proxy: ProxyEndpoint, label: str) -> None:
    box = load_runtime(backend, settings).create(spec, labels={"polar.attempt": label}, proxy=proxy, timeout=60)
    box.write("f", b"x")
    box.exec("sleep 1000 & setsid sleep 1000 </dev/null >/dev/null 2>&1 & sleep 0.1", timeout=60)
    box.stop()
    box.destroy()


def calls_of(run, die_at: int | None) -> int:
    """How many functions of the runtimes `run` calls; dies at number `die_at`, as from kill -9."""
    count = 0

    def step(frame, event, _arg) -> None:
        nonlocal count
        if event == "call" and f"{os.sep}runtimes{os.sep}" in frame.f_code.co_filename:
            count += 1
            if count == die_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(step)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def child(run: Callable[[], object], kill_after: float | None = None) -> int:
    """Exit status of `run` in a process of its own, which gets kill -9 after that many seconds."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def leftovers(data_dir: str, handles: set[str]) -> dict[str, list]:
    """What is still there of sandboxes that were removed, by kind."""
    words = [w.encode() for w in (data_dir, *handles)]
    groups = cgroups.find()
    kept = ("boxes", "disks", "records", "cache/blobs", "cache/tmp")
    places = [os.path.join(data_dir, p) for p in ("sandboxes", "scratch", *(f"apptainer/{n}" for n in kept))]
    # Images stay; what begins with a dot is one that comes or goes.
    places += map(str, Path(data_dir, "apptainer/cache/images").glob(".*"))
    return {
        "folders": [os.path.join(at, n) for p in places for at, dirs, files in os.walk(p) for n in (*dirs, *files)],
        "processes": [
            p
            for p in procs.scan().keys() - _above()
            if any(procs.environ_contains(p, w) or procs.argv_contains(p, w) for w in words)
        ],
        "groups": sorted(groups.names() & handles) if isinstance(groups, cgroups.Cgroups) else [],
        "mounts": [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if data_dir in line],
        "loops": [str(f) for f in Path("/sys/block").glob("loop*/loop/backing_file") if data_dir in _text(f)],
    }


def _above() -> set[int]:
    """This process and those that started it: their arguments say where it works."""
    all, pid, found = procs.scan(), os.getpid(), set()
    while pid in all:
        found.add(pid)
        pid = all[pid].ppid
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it is being let go
        return ""


def settled(data_dir: str, handles: set[str]) -> dict[str, list]:
    """The same, once the kernel has let go of what is going."""
    deadline = time.monotonic() + 5
    while any((left := leftovers(data_dir, handles)).values()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return {kind: found for kind, found in left.items() if found}


def main(backend: str, data_dir: str, spec: str, proxy: str, deaths: int, seed: str) -> None:
    settings, wanted = Settings(data_dir=data_dir), from_json(spec, RuntimeSpec)
    endpoint = from_json(proxy, ProxyEndpoint)
    r, w = os.pipe()

    def whole() -> None:
        begun = time.monotonic()
        total = calls_of(lambda: session(backend, settings, wanted, endpoint, "whole"), None)
        os.write(w, f"{total} {time.monotonic() - begun}".encode())

    assert child(whole) == 0
    total, seconds = os.read(r, 100).decode().split()
    steps: list[tuple[str, float]]
    if seed:
        dice = random.Random(seed)
        steps = [("after", float(seconds) * dice.random()) for _ in range(deaths)]
    else:
        # Denser at the beginning, where a sandbox comes into being.
        steps = [
            ("call", n) for n in sorted({max(1, int(int(total) * (n / deaths) ** 2)) for n in range(1, deaths + 1)})
        ]
        # And while an engine or another program is at work for it.
        steps += [("after", float(seconds) * (n + 0.5) / deaths) for n in range(deaths)]
    killed, seen, left = 0, set(), []
    for i, (kind, at) in enumerate(steps):
        label = f"killed-{os.getpid()}-{i}"

        def run(kind=kind, at=at, label=label) -> None:
            def whole() -> None:
                session(backend, settings, wanted, endpoint, label)

            calls_of(whole, int(at)) if kind == "call" else whole()

        killed += os.WIFSIGNALED(child(run, at if kind == "after" else None))
        runtime = load_runtime(backend, settings)
        # The janitor comes again and again: an engine may still be at work on what it was asked for.
        for _ in range(ROUNDS):
            found = runtime.list({"polar.attempt": label})
            for ref in found:
                box = runtime.attach(ref)
                box.stop()
                box.destroy()
            seen |= {ref.handle for ref in found}
            here = settled(data_dir, seen)
            if not (again := [r.handle for r in runtime.list({"polar.attempt": label})]):
                break
            here["listed"] = again
        if here:
            left.append([kind, at, here])
    print(json.dumps({"steps": len(steps), "killed": killed, "found": len(seen), "left": left}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6])
