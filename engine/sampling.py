"""From logits to sampled tokens and their log-probabilities."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine.request import Request

_NEVER = float("-inf")


class Sampled(NamedTuple):
    """One sampled token; log-probabilities are log_softmax(logits / temperature) over all tokens."""

    token: int
    logprob: float
    top: list[tuple[float, int]]  # the most likely tokens, where asked for
    probe: list[tuple[float, int]]  # the tokens of `token_ids_logprob`


@torch.inference_mode()
def sample(logits: torch.Tensor, requests: list[Request], eos: frozenset[int]) -> list[Sampled | None]:
    """Sample one token per row of logits [requests, vocab] (changed in place); None where a row isn't a
    distribution.

    As in SGLang, log-probabilities are taken before top-p, top-k and min-p, and greedy ones at temperature 1.
    """
    for row, request in zip(logits, requests, strict=True):
        params = request.params
        if len(request.output) < params.min_new_tokens:
            row[list(eos | set(params.stop_token_ids or []))] = _NEVER
    temperatures = torch.tensor([1.0 if request.params.greedy else request.params.temperature for request in requests])
    logprobs = torch.log_softmax(logits.div_(temperatures[:, None]), dim=-1)
    broken = torch.isnan(logprobs).any(dim=-1).tolist()
    best = logprobs.argmax(dim=-1).tolist()
    results: list[Sampled | None] = []
    for index, request in enumerate(requests):
        if broken[index]:
            results.append(None)
            continue
        row = logprobs[index]
        token = best[index] if request.params.greedy else _draw(row, request)
        results.append(Sampled(token, row[token].item(), *alternatives(row, request)))
    return results


def alternatives(row: torch.Tensor, request: Request) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """The most likely tokens and the probed ones of a row of log-probabilities, as the request wants them."""
    top: list[tuple[float, int]] = []
    if request.top:
        values, ids = row.topk(min(request.top, row.numel()))
        top = list(zip(values.tolist(), ids.tolist(), strict=True))
    probe = [(row[token].item(), token) for token in request.probe_ids or []]
    return top, probe


def _draw(logprobs: torch.Tensor, request: Request) -> int:
    """Draw by inverting the cumulative distribution: one uniform number per token, so seeds give the same
    text again.
    """
    params = request.params
    probs = logprobs.double().exp_()
    order = None
    if params.top_p < 1 or params.top_k > 0 or params.min_p > 0:
        probs, order = probs.topk(min(params.top_k, len(probs))) if params.top_k > 0 else probs.sort(descending=True)
        keep = torch.ones_like(probs, dtype=torch.bool)
        if params.top_p < 1:
            keep &= probs.cumsum(0) - probs <= params.top_p
        if params.min_p > 0:
            keep &= probs >= probs[0] * params.min_p
        probs = probs * keep
    total = probs.cumsum(0)
    uniform = torch.rand(1, dtype=torch.float64, generator=request.generator)
    place = int(torch.searchsorted(total, uniform * total[-1], right=True))
    if place >= probs.numel():  # rounding at the very end
        place = int(probs.argmax())
    return place if order is None else int(order[place])
