"""A sandbox that waited for its task keeps what every sandbox promises: the same tests, each on warm ones."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from polar.sandbox import LABEL_NAMESPACE, LABEL_NODE, Sandbox
from polar.store.connection import connect
from polar.store.keys import Keys
from runtimes.warm import WarmRuntime
from runtimes.warm_image import image_id
from runtimes.warm_ledger import Ledger
from runtimes.warm_pool import Pool
from runtimes.warm_shape import wish
from tests.runtimes import test_conformance as all_of_them
from tests.runtimes.conftest import Backend, until

MINE = {LABEL_NAMESPACE: "warm", LABEL_NODE: "n"}


@dataclass
class WarmBackend(Backend):
    warm: list[str] = field(default_factory=list)  # handles that came out of the pool

    def create(self, proxy=None, labels=None, **fields: Any) -> Sandbox:
        """Waits until there is a warm one, where there may be."""
        assert isinstance(self.runtime, WarmRuntime) and self.runtime.pool
        pool = self.runtime.pool
        wanted = wish(self.spec(**fields), proxy)
        if wanted:
            for _ in range(8):
                pool.ask(wanted)
            until(lambda: pool.idle(wanted.key), 60)
        made = {r.handle for r in self.runtime.list(pool.labels)}
        box = super().create(proxy, {**MINE, **(labels or {})}, **fields)
        assert (box.ref.handle in made) == (wanted is not None)
        if wanted:
            self.warm.append(box.ref.handle)
        return box


@pytest.fixture(scope="module")
def backend(backend: Backend, redis_url: str) -> Iterator[WarmBackend]:
    with connect(redis_url) as client:
        ledger = Ledger(client, Keys(f"t{uuid.uuid4().hex}"), "n", backend.runtime.name, 15)
        pool = Pool(
            backend.runtime, ledger, MINE, 1, 300, lambda spec: image_id(backend.runtime, backend.settings, spec)
        )
        runtime = WarmRuntime(backend.runtime, ledger, MINE, pool)
        made = WarmBackend(backend.id, runtime, backend.settings, backend.base)
        yield made
        made.clear()
        pool.close()
        assert made.warm
        assert backend.runtime.list(pool.labels) == [], "the closed pool left something"


for name in (
    "it_is_a_runtime", "a_command_runs_in_the_working_directory", "environment", "stdin_comes_whole_and_ends",
    "output_is_bounded_and_logged", "the_whole_tree_is_killed", "what_an_earlier_command_left_running",
    "stop_kills_everything_and_keeps_the_files", "upload_and_download", "download_follows_no_link_out",
    "list_and_destroy", "another_process_attaches", "the_proxy_is_reached",
    "a_restarted_proxy_is_reached_again", "nothing_else_is_reached", "network_none_reaches_not_even_the_proxy",
    "without_a_proxy_nothing_is_reached", "unknown_options_are_refused", "volumes", "workdir",
    "no_rights_are_held_or_gained", "user", "a_sandbox_that_is_gone_says_nothing_about_the_agent",
):  # fmt: skip
    globals()[f"test_{name}"] = getattr(all_of_them, f"test_{name}")
