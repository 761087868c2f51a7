"""Prometheus metrics of one proxy, in a registry of their own (a process may hold several proxies in tests).

Labels are bounded: what comes from a template, an engine or a client is put into a class before it becomes one.
"""

from __future__ import annotations

import asyncio
import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from polar.completion import Completion

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_MOMENTS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5)
_BYTES = tuple(1 << n for n in range(10, 27, 2))
_LAG_EVERY = 0.05
_CLASSES = 48  # distinct values of one open label; what comes later is "other"
_ABORTS = {
    "client went away": "client",
    "the session has ended": "session",
    "the proxy is shutting down": "shutdown",
}


class Metrics:
    def __init__(self) -> None:
        self.registry = r = CollectorRegistry()
        self.calls = Counter("polar_proxy_calls", "Calls answered", ["dialect", "action", "status"], registry=r)
        self.body = Histogram("polar_proxy_request_bytes", "Size of request bodies", buckets=_BYTES, registry=r)
        self.added = Histogram(
            "polar_proxy_added_seconds", "A call's time but for the engine's and pauses", buckets=_MOMENTS, registry=r
        )
        self.completions = Counter(
            "polar_proxy_completions", "Completions stored", ["finish", "link", "trainable"], registry=r
        )
        self.links = Counter(
            "polar_proxy_links",
            "How prompts were linked to earlier completions, and why",
            ["link", "reason"],
            registry=r,
        )
        self.tokens = Counter("polar_proxy_tokens", "Tokens of stored completions", ["kind"], registry=r)
        self.generating = Gauge("polar_proxy_generations", "Generations in flight", registry=r)
        self.streams = Gauge("polar_proxy_streams", "Client streams open", registry=r)
        self.first_token = Histogram(
            "polar_proxy_first_token_seconds", "To the first token", buckets=_SECONDS, registry=r
        )
        self.duration = Histogram("polar_proxy_completion_seconds", "Whole completion", buckets=_SECONDS, registry=r)
        self.repeats = Counter(
            "polar_proxy_repeats",
            "Calls that were sent before: joined, replayed or sampled again",
            ["kind"],
            registry=r,
        )
        self.aborts = Counter("polar_proxy_aborts", "Generations cancelled", ["reason"], registry=r)
        self.refused = Counter("polar_proxy_refused", "Calls refused over a limit", ["limit"], registry=r)
        self.contradictions = Counter(
            "polar_proxy_contradictions", "Streams broken off by their final parse", registry=r
        )
        self.resets = Counter("polar_proxy_resets", "Client streams broken off", registry=r)
        self.stalled = Counter("polar_proxy_stalled", "Clients dropped because they didn't read", registry=r)
        self.heartbeats = Counter("polar_proxy_heartbeats", "Heartbeats sent in streams", registry=r)
        self.store_retries = Counter("polar_proxy_store_retries", "Completions stored at a later try", registry=r)
        self.loop_lag = Histogram(
            "polar_proxy_loop_lag_seconds", "How late the event loop runs a timer", buckets=_MOMENTS, registry=r
        )
        self._classes: dict[str, set[str]] = {}

    def stored(self, c: Completion) -> None:
        self.completions.labels(c.finish_reason, c.link, self.classed("untrainable", c.untrainable) or "yes").inc()
        self.links.labels(c.link, self.classed("reason", c.link_reason)).inc()
        if c.link == "sibling":
            self.repeats.labels("sibling").inc()
        self.tokens.labels("prompt").inc(c.prompt_length)
        self.tokens.labels("prompt_shared").inc(c.prompt_shared)
        self.tokens.labels("sampled").inc(len(c.sampled_ids))
        self.tokens.labels("cached").inc(c.cached_tokens)
        if c.first_token_at:
            self.first_token.observe(max(0.0, c.first_token_at - c.started_at))
        self.duration.observe(max(0.0, c.finished_at - c.started_at))

    def aborted(self, reason: str) -> None:
        self.aborts.labels(_ABORTS.get(reason, "other")).inc()

    def classed(self, label: str, text: str) -> str:
        """The class of a free text: its first words, in letters, as long as there are few of them."""
        name = "_".join(re.findall(r"[a-z]+", text.partition(":")[0].lower())[:8])[:64]
        known = self._classes.setdefault(label, set())
        if name not in known:
            if len(known) >= _CLASSES:
                return "other"
            known.add(name)
        return name

    async def watch_loop(self) -> None:
        """Measure the loop's lag until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_EVERY
            await asyncio.sleep(_LAG_EVERY)
            self.loop_lag.observe(max(0.0, loop.time() - due))

    def text(self) -> bytes:
        return generate_latest(self.registry)
