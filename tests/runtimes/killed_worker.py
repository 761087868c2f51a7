"""A worker that dies at its N-th step, for many N, and the janitor after it. Run as a program: prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from polar.codec import from_json
from polar.config import Settings
from polar.sandbox import ProxyEndpoint
from polar.task import RuntimeSpec
from runtimes import cgroups, procs
from runtimes.registry import load_runtime


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


def child(run) -> int:
    """Exit status of `run` in a process of its own; its result goes through a pipe."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def main(backend: str, data_dir: str, spec: str, proxy: str, deaths: int) -> None:
    settings, wanted = Settings(data_dir=data_dir), from_json(spec, RuntimeSpec)
    endpoint = from_json(proxy, ProxyEndpoint)
    r, w = os.pipe()

    def whole() -> None:
        begun = time.monotonic()
        total = calls_of(lambda: session(backend, settings, wanted, endpoint, "whole"), None)
        os.write(w, f"{total} {time.monotonic() - begun}".encode())

    assert child(whole) == 0
    total, seconds = os.read(r, 100).decode().split()
    # Denser at the beginning, where a sandbox comes into being.
    steps: list[tuple[str, float]] = [
        ("call", n) for n in sorted({max(1, int(int(total) * (n / deaths) ** 2)) for n in range(1, deaths + 1)})
    ]
    # And while an engine or another program is at work for it.
    steps += [("after", float(seconds) * (n + 0.5) / deaths) for n in range(deaths)]
    killed, seen, left = 0, [], []
    for i, (kind, at) in enumerate(steps):
        label = f"killed-{os.getpid()}-{i}"

        def run(kind=kind, at=at, label=label) -> None:
            def whole() -> None:
                session(backend, settings, wanted, endpoint, label)

            if kind == "call":
                calls_of(whole, int(at))
            else:
                signal.setitimer(signal.ITIMER_REAL, at)  # nobody handles it: the process ends at once
                whole()

        killed += os.WIFSIGNALED(child(run))
        runtime = load_runtime(backend, settings)
        for ref in runtime.list({"polar.attempt": label}):
            seen.append(ref.handle)
            box = runtime.attach(ref)
            box.stop()
            box.destroy()
        left += [r.handle for r in runtime.list({"polar.attempt": label})]
    groups = cgroups.find()
    names = groups.names() if isinstance(groups, cgroups.Cgroups) else set()
    mine = data_dir.encode()
    places = [os.path.join(data_dir, p) for p in ("sandboxes", "apptainer/boxes", "apptainer/records")]
    told = {
        "steps": len(steps),
        "killed": killed,
        "found": len(seen),
        "left": left,
        "groups": sorted(names & set(seen)),
        "processes": [p for p in procs.scan() if p != os.getpid() and procs.environ_contains(p, mine)],
        "mounts": data_dir in Path("/proc/self/mountinfo").read_text(),
        "folders": [os.path.join(at, n) for p in places for at, dirs, files in os.walk(p) for n in (*dirs, *files)],
    }
    print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5]))
