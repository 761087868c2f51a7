"""What sandboxes cost: each step's time on each back-end, one after another and 16 at once, against the bare tools.

Every number comes from one run, and the bare command line or SDK (`bare`) takes turns with the runtime. Times are
milliseconds; `cycles_per_s` counts whole lives: create, exec, upload, download, stop, destroy.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks import runtimes_bare as bare
from benchmarks import runtimes_warm
from polar.config import Settings
from polar.sandbox import Runtime, Sandbox
from polar.task import RuntimeSpec
from runtimes import apptainer_cli, bwrap
from runtimes.apptainer import ApptainerRuntime
from runtimes.docker import DockerRuntime
from runtimes.local import LocalRuntime

STEPS = ("create", "exec", "upload", "download", "stop", "destroy")
Times = dict[str, list[float]]


class Contestant(NamedTuple):
    settings: Settings
    runtime: Runtime
    spec: RuntimeSpec
    control: Callable[[], bare.Bare]


class Ours:
    """A runtime's sandbox with the steps of a bare one."""

    def __init__(self, c: Contestant, scratch: Path):
        self._c, self._scratch = c, scratch

    def create(self) -> None:
        self._box: Sandbox = self._c.runtime.create(self._c.spec, labels={"polar.bench": "1"}, proxy=None, timeout=120)

    def exec(self) -> None:
        assert self._box.exec(["true"], timeout=60).exit_code == 0

    def upload(self) -> None:
        self._box.write("f", bare.DATA)

    def download(self) -> None:
        target = self._scratch / self._box.ref.handle
        self._box.download("f", target, limit=1 << 20)
        target.unlink()

    def stop(self) -> None:
        self._box.stop()

    def destroy(self) -> None:
        self._box.destroy()


def life(one: bare.Bare, times: Times) -> None:
    for step in STEPS:
        begun = time.monotonic()
        getattr(one, step)()
        times[step].append((time.monotonic() - begun) * 1000)


def measured(make: Callable[[], bare.Bare], n: int, parallel: int) -> tuple[Times, float]:
    times: Times = defaultdict(list)
    begun = time.monotonic()
    with ThreadPoolExecutor(parallel) as pool:
        for done in [pool.submit(life, make(), times) for _ in range(n)]:
            done.result()
    return times, time.monotonic() - begun


def compare(c: Contestant, scratch: Path, n: int, parallel: int) -> dict[str, dict]:
    """Ours and the bare tools' in turns, in quarters, so that a machine that changes its mind is fair to both."""
    out = {}
    collected: dict[str, tuple[Times, float]] = {}
    sides: dict[str, Callable[[], bare.Bare]] = {"polar": lambda: Ours(c, scratch), "bare": c.control}
    rounds = 4 if n >= 4 * parallel else 1
    for _ in range(rounds):
        for side, make in sides.items():
            times, seconds = measured(make, max(1, n // rounds), parallel)
            before, total = collected.setdefault(side, (defaultdict(list), 0.0))
            for step, values in times.items():
                before[step] += values
            collected[side] = (before, total + seconds)
    for side, (times, seconds) in collected.items():
        line: dict = {step: {"p50": _at(times[step], 0.5), "p95": _at(times[step], 0.95)} for step in STEPS}
        line["cycles_per_s"] = round(len(times["create"]) / seconds, 2)
        out[side] = line
    return out


def from_pool(c: Contestant, n: int) -> dict[str, dict[str, float]]:
    times = runtimes_warm.creates(c.runtime, c.settings, c.spec, n)
    return {kind: {"p50": _at(values, 0.5), "p95": _at(values, 0.95)} for kind, values in times.items()}


def _at(values: list[float], part: float) -> float:
    if part == 0.5:
        return round(statistics.median(values), 1)
    return round(sorted(values)[min(len(values) - 1, int(len(values) * part))], 1)


@contextmanager
def contestants(wanted: list[str], image: str, apptainer_image: str) -> Iterator[dict[str, Contestant | str]]:
    """By name; a text says why one can't take part."""
    with ExitStack() as stack:
        # Containers' owners must get in: not a private temporary folder.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polar-bench-", dir="/var/tmp")))
        folder.chmod(0o755)
        settings = Settings(data_dir=str(folder / "data"), volume_roots=["/var", "/opt", "/srv", "/home", "/scratch"])
        out: dict[str, Contestant | str] = {}
        for name in wanted:
            if name == "local-plain":
                spec = RuntimeSpec(options={"isolation": "none"})
                out[name] = Contestant(settings, LocalRuntime(settings), spec, bare.Folder)
            elif name == "local-bwrap":
                found = bwrap.find()
                spec = RuntimeSpec(options={"isolation": "bwrap"})
                out[name] = (
                    found
                    if isinstance(found, str)
                    else Contestant(settings, LocalRuntime(settings), spec, bare.bubblewrap)
                )
            elif name == "docker":
                docker = DockerRuntime(settings)
                ok, why = docker.available()
                if ok:
                    api = stack.enter_context(bare.docker_api())
                    spec = RuntimeSpec(image=image, workdir="/work")
                    out[name] = Contestant(settings, docker, spec, lambda api=api: bare.Docker(api, image))  # type: ignore[misc]
                else:
                    out[name] = why
            elif name == "apptainer":
                cli = apptainer_cli.find()
                if isinstance(cli, str) or not os.path.exists(apptainer_image):
                    out[name] = cli if isinstance(cli, str) else f"no image at '{apptainer_image}' (--apptainer-image)"
                else:
                    (base := folder / "bare").mkdir()
                    spec = RuntimeSpec(image=apptainer_image, workdir="/work")
                    control = lambda cli=cli, base=base: bare.Apptainer(cli, apptainer_image, base)  # noqa: E731
                    out[name] = Contestant(settings, ApptainerRuntime(settings), spec, control)
            else:
                out[name] = "unknown; allowed: local-plain, local-bwrap, docker, apptainer"
        yield out


def main() -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.runtimes", description=__doc__)
    p.add_argument("--backends", default="local-plain,local-bwrap,docker,apptainer")
    p.add_argument("--sequential", type=int, default=12)
    p.add_argument("--parallel", type=int, default=16, help="sandboxes at once in the second half")
    p.add_argument("--lives", type=int, default=48, help="sandboxes of the second half")
    p.add_argument("--image", default="polar-sandbox:base")
    p.add_argument("--apptainer-image", default="/var/tmp/polar-apptainer-base")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    logging.getLogger("polar.local").setLevel(logging.ERROR)  # plain processes are meant here
    result: dict = {"cores": os.cpu_count(), "load_before": round(os.getloadavg()[0], 1), "backends": {}}
    with contestants(args.backends.split(","), args.image, args.apptainer_image) as found:
        for name, c in found.items():
            if isinstance(c, str):
                result["backends"][name] = {"skipped": c}
                continue
            with tempfile.TemporaryDirectory() as scratch:
                life(Ours(c, Path(scratch)), defaultdict(list))  # an image's first use is not the sandbox's cost
                result["backends"][name] = {
                    "sequential": compare(c, Path(scratch), args.sequential, 1),
                    f"parallel_{args.parallel}": compare(c, Path(scratch), args.lives, args.parallel),
                    "create_from": from_pool(c, args.sequential),
                }
    if args.json:
        print(json.dumps(result))
    else:
        show(result)
    return 0


def show(result: dict) -> None:
    print(f"{result['cores']} cores, load {result['load_before']}; milliseconds p50/p95")
    for name, modes in result["backends"].items():
        if "skipped" in modes:
            print(f"{name}: skipped: {modes['skipped']}")
            continue
        for mode, sides in modes.items():
            if mode == "create_from":
                for kind, line in sides.items():
                    print(f"{name:12} {mode:12} {kind:6} create {line['p50']:.0f}/{line['p95']:.0f}")
                continue
            for side, line in sides.items():
                steps = "  ".join(f"{s} {line[s]['p50']:.0f}/{line[s]['p95']:.0f}" for s in STEPS)
                print(f"{name:12} {mode:12} {side:6} {steps}  {line['cycles_per_s']} cycles/s")


if __name__ == "__main__":
    raise SystemExit(main())
