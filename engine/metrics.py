"""Prometheus metrics under SGLang's names, in a registry of their own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_FIRST = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
_BETWEEN = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)
_WHOLE = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


class Metrics:
    """Counters and gauges of one engine; `generation_tokens` counts every token sampled, delivered or not."""

    def __init__(self, model_name: str):
        self.registry = CollectorRegistry()
        self._name = model_name
        self.running = self._make(Gauge, "num_running_reqs", "Requests in the running batch")
        self.queued = self._make(Gauge, "num_queue_reqs", "Requests waiting")
        self.paused = self._make(Gauge, "num_paused_reqs", "Requests held by a pause")
        self.used_tokens = self._make(Gauge, "num_used_tokens", "Tokens of key/value memory in use, cache included")
        self.token_usage = self._make(Gauge, "token_usage", "Share of key/value memory in use, cache included")
        self.hit_rate = self._make(Gauge, "cache_hit_rate", "Share of all prompt tokens found in the prefix cache")
        self.prompt_tokens = self._make(Counter, "prompt_tokens_total", "Prompt tokens of admitted requests")
        self.generation_tokens = self._make(Counter, "generation_tokens_total", "Tokens sampled")
        self.cached_tokens = self._make(Counter, "cached_tokens_total", "Prompt tokens found in the prefix cache")
        self.requests = self._make(Counter, "num_requests_total", "Requests finished")
        self.aborted = self._make(Counter, "num_aborted_requests_total", "Requests aborted")
        self.retracted = self._make(Counter, "num_retracted_requests_total", "Times a running request lost its place")
        self.first_token = self._make(Histogram, "time_to_first_token_seconds", "Arrival to first token", _FIRST)
        self.between = self._make(Histogram, "inter_token_latency_seconds", "Time between tokens", _BETWEEN)
        self.whole = self._make(Histogram, "e2e_request_latency_seconds", "Arrival to end", _WHOLE)
        self.queue_time = self._make(Histogram, "queue_time_seconds", "Arrival to admission", _FIRST)

    def _make(self, kind, name: str, text: str, buckets=None):
        extra = {"buckets": buckets} if buckets else {}
        metric = kind(f"sglang:{name}", text, ["model_name"], registry=self.registry, **extra)
        return metric.labels(model_name=self._name)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)
