"""The engines in metrics: read from the pools when asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from proxy.pausing import Pauses


class EngineCollector(Collector):
    def __init__(self, engines: Callable[[], dict[str, Any]], pauses: Pauses):
        self._engines, self._pauses = engines, pauses

    def collect(self) -> Iterator[Metric]:
        by_server = ["model", "server"]
        up = GaugeMetricFamily("polar_proxy_engine_up", "Whether a server answers", labels=by_server)
        flying = GaugeMetricFamily("polar_proxy_engine_in_flight", "Requests at a server", labels=by_server)
        homes = GaugeMetricFamily("polar_proxy_engine_sessions", "Sessions that stay with a server", labels=by_server)
        counts = {
            "retries": CounterMetricFamily(
                "polar_proxy_engine_retries", "Requests sent again before a token", labels=["model"]
            ),
            "resumed": CounterMetricFamily(
                "polar_proxy_engine_resumed", "Interrupted generations taken up again", labels=["model"]
            ),
            "moved": CounterMetricFamily(
                "polar_proxy_engine_moved", "Sessions that lost their server", labels=["model"]
            ),
        }
        for model, engine in self._engines().items():
            for server in engine["servers"]:
                at = [model, server["url"]]
                up.add_metric(at, float(server["up"]))
                flying.add_metric(at, server["in_flight"])
                homes.add_metric(at, server["sessions"])
            for name, family in counts.items():
                family.add_metric([model], engine[name])
        held = GaugeMetricFamily("polar_proxy_held", "Calls that wait for the end of a pause", labels=["model"])
        paused = GaugeMetricFamily("polar_proxy_paused", "Whether a model is paused", labels=["model"])
        for model, state in self._pauses.state()["models"].items():
            held.add_metric([model], state["held"])
            paused.add_metric([model], float(state["paused"]))
        expired = CounterMetricFamily("polar_proxy_pauses_expired", "Pauses that nobody ended", self._pauses.expired)
        yield from (up, flying, homes, *counts.values(), held, paused, expired)
