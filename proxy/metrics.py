"""Prometheus metrics of one proxy, in a registry of their own (a process may hold several proxies in tests)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polar.completion import Completion

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.calls = Counter("polar_proxy_calls", "Model calls answered", ["dialect", "status"], registry=r)
        self.completions = Counter(
            "polar_proxy_completions", "Completions stored", ["finish", "link", "trainable"], registry=r
        )
        self.tokens = Counter("polar_proxy_tokens", "Tokens of stored completions", ["kind"], registry=r)
        self.generating = Gauge("polar_proxy_generations", "Generations in flight", registry=r)
        self.first_token = Histogram(
            "polar_proxy_first_token_seconds", "To the first token", buckets=_SECONDS, registry=r
        )
        self.duration = Histogram("polar_proxy_completion_seconds", "Whole completion", buckets=_SECONDS, registry=r)
        self.contradictions = Counter(
            "polar_proxy_contradictions", "Streams broken off by their final parse", registry=r
        )
        self.resets = Counter("polar_proxy_resets", "Client streams broken off", registry=r)
        self.heartbeats = Counter("polar_proxy_heartbeats", "Heartbeats sent in streams", registry=r)

    def stored(self, c: Completion) -> None:
        self.completions.labels(c.finish_reason, c.link, c.untrainable or "yes").inc()
        self.tokens.labels("prompt").inc(c.prompt_length)
        self.tokens.labels("sampled").inc(len(c.sampled_ids))
        self.tokens.labels("cached").inc(c.cached_tokens)
        if c.first_token_at:
            self.first_token.observe(max(0.0, c.first_token_at - c.started_at))
        self.duration.observe(max(0.0, c.finished_at - c.started_at))

    def text(self) -> bytes:
        return generate_latest(self.registry)
