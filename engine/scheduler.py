"""Continuous batching: which requests run, and one step of all of them. Lives on the model thread.

transformers 5.24 has continuous batching of its own; it isn't used because its log-probabilities are those
after top-k and top-p, sampling or greedy is one choice for the whole server, and it knows no seeds, stop
strings, pauses or weight swaps.

A step packs one token of every decoding sequence and up to `prefill_chunk` prompt tokens into one forward
pass.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from engine.kv import Pool, common_prefix
from engine.metrics import Metrics
from engine.model import Model, Work
from engine.options import Options
from engine.request import Request
from engine.sampling import Sampled, alternatives, sample

log = logging.getLogger(__name__)

# A prompt waits for a running one that is computing this many of its tokens already, instead of computing
# them again.
_WORTH_WAITING = 32
# A prompt token after so many others costs twice as much as the first: longer contexts get shorter chunks, so that a
# step, which nothing can interrupt, takes about the same time.
_ATTENTION_COSTS_AS_MUCH = 4096
ABORTED = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}


def failure(message: str, status: int = 500) -> dict:
    """The finish reason of a generation that went wrong."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": "InternalServerError"}


class Scheduler:
    """Waiting and running requests of one model.

    Attributes:
        version: weight version that the next token is attributed to.
        barrier: requests that arrived after this number aren't admitted.
    """

    def __init__(self, model: Model, eos: frozenset[int], options: Options, metrics: Metrics):
        self.model, self.eos, self.options, self.metrics = model, eos, options, metrics
        budget = options.kv_bytes // model.shape.token_bytes
        # One sequence of full length must always fit, or it could never finish.
        self.pool = Pool(model.shape, max(budget, model.context + 64), options.prefix_entries)
        self.version = options.weight_version
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.barrier: int | None = None
        self.changed: set[Request] = set()
        self._prompt_tokens = self._cached_tokens = 0

    def step(self) -> None:
        """Admit what fits, run one forward pass, sample, finish what is done."""
        self._admit()
        plan = self._plan()
        if not plan:
            return
        works = [Work(request.memory, ids, logits_from) for request, ids, logits_from in plan]
        try:
            logits = self.model.forward(works)
        except Exception as error:  # the engine survives whatever one batch does
            log.exception("a forward pass failed")
            for request, _, _ in plan:
                self.finish(request, failure(f"The forward pass failed: {error}"), keep=False)
            return
        row = 0
        sampling: list[Request] = []
        rows: list[int] = []
        for request, ids, logits_from in plan:
            count = len(ids) - logits_from
            done = request.memory.length == request.length  # no token of it is left to compute
            inputs = count - done
            if inputs:
                self._input_logprobs(request, logits[row : row + inputs])
            if done and request.limit > 0:
                sampling.append(request)
                rows.append(row + count - 1)
            elif done:
                self.finish(request, {"type": "length", "length": 0})
            row += count
        if sampling:
            for request, sampled in zip(sampling, sample(logits[rows], sampling, self.eos), strict=True):
                self._take(request, sampled)

    def abort(self, chosen: Callable[[Request], bool]) -> None:
        """Finish the chosen requests, running or waiting, with what they have."""
        for request in [request for request in (*self.running, *self.waiting) if chosen(request)]:
            self.finish(request, ABORTED)
            self.metrics.aborted.inc()

    def retract(self, request: Request) -> None:
        """Take a running request's memory away; it goes on later from its tokens."""
        self.running.remove(request)
        self.pool.free(request.memory)
        request.kv = None
        request.retractions += 1
        self.waiting.appendleft(request)
        self.metrics.retracted.inc()

    def retract_all(self) -> None:
        """Take the memory of all running requests away; their order is kept."""
        for request in reversed(list(self.running)):
            self.retract(request)

    def finish(self, request: Request, reason: dict, keep: bool = True) -> None:
        """End a request, keeping its keys and values for the next turn."""
        if request.kv is not None:
            self.running.remove(request)
            if keep:
                self.pool.keep(request.kv, request.tokens(0, request.kv.length))
            else:
                self.pool.free(request.kv)
            request.kv = None
        else:
            self.waiting.remove(request)
        request.publish(reason, failed=reason.get("status_code") or 0)
        self.changed.add(request)
        if request.counted:
            self.metrics.requests.inc()
            self.metrics.whole.observe(time.time() - request.created)

    def _admit(self) -> None:
        late: list[Request] = []
        while self.waiting and len(self.running) < self.options.max_running:
            request = self.waiting.popleft()
            if self.barrier is not None and request.order > self.barrier and not request.retractions:
                late.append(request)
                continue
            fate = self._place(request)
            if fate != "placed":
                late.append(request)
                if fate == "no room":
                    break
        self.waiting.extendleft(reversed(late))

    def _place(self, request: Request) -> str:
        """Give a request memory and what is known of its tokens: placed, deferred or no room."""
        ids = np.asarray(request.tokens(0, request.length), dtype=np.int32)
        # At least the last token must be computed, and everything whose log-probabilities are wanted.
        usable = min(len(ids) - 1, request.first_wanted)
        source, shared = self.pool.match(ids[:usable])
        cached = source
        for other in self.running:
            if other.memory.epoch != self.pool.epoch:
                continue
            common = common_prefix(np.asarray(other.tokens(0, other.length), dtype=np.int32), ids[:usable])
            ready = min(common, other.memory.length)
            if common - max(shared, ready) >= _WORTH_WAITING and other.memory.length < len(other.prompt):
                return "deferred"
            if ready > shared:
                source, shared, cached = other.memory, ready, None
        if cached is not None and shared == cached.length:
            request.kv = self.pool.take(cached, shared)
            if not self.pool.grow(request.kv, len(ids) + 1):
                self.pool.keep(request.kv, request.tokens(0, shared))
                request.kv = None
                return "no room"
        else:
            request.kv = self.pool.new(len(ids) + min(request.limit, 64))
            if request.kv is None:
                return "no room"
            if source is not None:
                request.kv.copy_prefix(source, shared)
        self.running.append(request)
        if request.cached is None:
            request.cached = shared
            request.started = time.time()
            if request.counted:
                self.metrics.prompt_tokens.inc(len(request.prompt))
                self.metrics.cached_tokens.inc(shared)
                self._prompt_tokens += len(request.prompt)
                self._cached_tokens += shared
                self.metrics.queue_time.observe(request.started - request.created)
        return "placed"

    def _plan(self) -> list[tuple[Request, list[int], int]]:
        """Choose this step's tokens and make sure of their memory.

        Returns (request, ids, index of the first id whose logits are wanted) per request.
        """
        plan: list[tuple[Request, list[int], int]] = []
        room = float(self.options.prefill_chunk)
        for request in list(self.running):
            if request.kv is None:  # retracted below, for an older one
                continue
            start = request.kv.length
            left = request.length - start
            cost = 1 + start / _ATTENTION_COSTS_AS_MUCH
            count = left if left == 1 else min(left, int(room / cost))
            if not count:
                continue
            while not self.pool.grow(request.kv, start + count):
                youngest = self.running[-1]
                self.retract(youngest)
                plan = [entry for entry in plan if entry[0] is not youngest]
                if youngest is request:
                    break
            if request.kv is None:
                continue
            if left > 1:
                room -= count * cost
            skipped = min(request.first_wanted - start, count)
            plan.append((request, request.tokens(start, start + count), skipped))
        return plan

    def _input_logprobs(self, request: Request, logits: torch.Tensor) -> None:
        """Record the log-probabilities of prompt tokens (unscaled, as SGLang's)."""
        for row in torch.log_softmax(logits, dim=-1):
            token = request.prompt[request.logprob_start + len(request.input_logprobs)]
            request.input_logprobs.append(row[token].item())
            top, probe = alternatives(row, request)
            request.input_tops.append(top)
            request.input_probes.append(probe)

    def _take(self, request: Request, sampled: Sampled | None) -> None:
        """Add a sampled token and see whether it ends the request."""
        if sampled is None:
            self.finish(request, failure("The model's logits aren't numbers (NaN)."), keep=False)
            return
        previous = request.last_token
        request.append(sampled.token, sampled.logprob, self.version)
        if request.top:
            request.tops.append(sampled.top)
        if request.probe_ids:
            request.probes.append(sampled.probe)
        if request.counted:
            self.metrics.generation_tokens.inc()
            if previous is None:
                self.metrics.first_token.observe(time.time() - request.created)
            else:
                self.metrics.between.observe(time.time() - previous)
        reason = self._reason_to_stop(request, sampled.token)
        if reason is not None:
            self.finish(request, reason)
        else:
            request.publish()
            self.changed.add(request)

    def _reason_to_stop(self, request: Request, token: int) -> dict | None:
        params = request.params
        ends = not params.ignore_eos and (token in self.eos or token in (params.stop_token_ids or ()))
        # The stop token is in the ids, but not in the text.
        matched = None if ends and not params.no_stop_trim else request.text.push(token)
        if ends:
            return {"type": "stop", "matched": token}
        if matched is not None:
            return {"type": "stop", "matched": matched}
        if len(request.output) >= request.limit:
            return {"type": "length", "length": len(request.output)}
        return None

    def gauges(self) -> None:
        """Refresh the gauges."""
        self.metrics.running.set(len(self.running))
        self.metrics.queued.set(len(self.waiting))
        self.metrics.hit_rate.set(self._cached_tokens / max(1, self._prompt_tokens))
        self.metrics.used_tokens.set(self.pool.used)
        self.metrics.token_usage.set(self.pool.used / self.pool.budget)
