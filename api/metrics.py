"""Prometheus metrics of the deployment and of this service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from api.control import control
from api.status import Snapshot
from api.wire import query

REGISTRY = web.AppKey("registry", CollectorRegistry)


class Deployment(Collector):
    def __init__(self, snapshot: Snapshot):
        self.snapshot = snapshot

    def describe(self) -> list[Metric]:
        return []  # nothing is read from Redis at registration

    def collect(self) -> Iterator[Metric]:
        s = self.snapshot.read()
        yield _gauge("polar_sessions", "Sessions by state", "state", s["states"])
        yield _gauge("polar_backlog", "Sessions that wait, by place", "place", s["backlog"])
        yield _counter("polar_terminations", "Sessions done, by how the run ended", "termination", s["terminations"])
        yield _counter("polar_verdicts", "Sessions done, by verdict", "verdict", s["verdicts"])
        nodes: dict[str, Any] = s["nodes"]
        for name in ("slots", "ready_places", "ready", "running", "draining", "init_failures", "alive"):
            values = {n: float(v[name]) for n, v in nodes.items()}
            yield _gauge(f"polar_node_{name}", f"Per node: {name}", "node", values)


def _gauge(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    m = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        m.add_metric([key], value)
    return m


def _counter(name: str, text: str, label: str, values: dict[str, Any]) -> Metric:
    m = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        m.add_metric([key], value)
    return m


def make(snapshot: Snapshot) -> tuple[CollectorRegistry, Histogram]:
    registry = CollectorRegistry()
    registry.register(Deployment(snapshot))
    seconds = Histogram(
        "polar_api_request_seconds", "Duration of requests", ["route", "method", "status"], registry=registry
    )
    return registry, seconds


def routes() -> list[web.RouteDef]:
    return [web.get("/metrics", metrics)]


async def metrics(request: web.Request) -> web.Response:
    query(request)
    text = await control(request).call(generate_latest, request.app[REGISTRY])
    return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
