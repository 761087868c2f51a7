"""From the body of /generate to requests."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from engine.core import Engine
from engine.errors import ApiError
from engine.protocol import GenerateBody, SamplingParams, sampling_params
from engine.request import Request
from engine.text import GrowingText

_MOST_PER_CALL = 1024


def build_requests(body: GenerateBody, engine: Engine) -> tuple[list[Request], bool]:
    """The requests of a body, and whether the answer is a list (a batch, or n > 1). Raises ApiError 400."""
    prompts, batched = _prompts(body, engine)
    size = len(prompts)
    given = body.sampling_params
    params = [sampling_params(item, engine.model.vocab) for item in _spread(given, size, "sampling_params")]
    if len({item.n for item in params}) > 1:
        raise ApiError("n must be the same for all prompts of a batch.")
    n = params[0].n
    if size * n > _MOST_PER_CALL:
        raise ApiError(f"At most {_MOST_PER_CALL} generations per call are allowed, got {size * n}.")
    fields = {
        "want_logprob": _spread(body.return_logprob, size, "return_logprob"),
        "logprob_start": _spread(body.logprob_start_len, size, "logprob_start_len"),
        "top": _spread(body.top_logprobs_num, size, "top_logprobs_num"),
    }
    probes = _probes(body.token_ids_logprob, size, engine.model.vocab)
    rids = _rids(body.rid, size, batched)
    requests = []
    for index, prompt in enumerate(prompts):
        for sample in range(n):
            requests.append(
                _request(
                    engine,
                    prompt,
                    params[index],
                    sample,
                    rid=rids[index] if n == 1 else f"{rids[index]}_{sample}",
                    group=body.rid if isinstance(body.rid, str) else rids[index],
                    probe_ids=probes[index],
                    **{name: values[index] for name, values in fields.items() if values[index] is not None},
                )
            )
    return requests, batched or n > 1


def health_request(engine: Engine) -> Request:
    """A generation of one token that no metric counts."""
    params = SamplingParams(max_new_tokens=1, temperature=0.0)
    rid = f"HEALTH_CHECK_{uuid4().hex}"
    return _request(engine, [0], params, 0, rid=rid, group=rid, counted=False)


def _request(engine: Engine, prompt: list[int], params: SamplingParams, sample: int, **fields: Any) -> Request:
    context = engine.model.context
    if len(prompt) >= context:
        raise ApiError(
            f"The input ({len(prompt)} tokens) is longer than the model's context length ({context} tokens)."
        )
    room = context - len(prompt)
    if fields.get("logprob_start", -1) > len(prompt):
        raise ApiError(f"logprob_start_len={fields['logprob_start']} is higher than the prompt, {len(prompt)} tokens.")
    limit = room if params.max_new_tokens is None else min(params.max_new_tokens, room)
    text = GrowingText(engine.tokenizer, params.stops, params.skip_special_tokens, trim=not params.no_stop_trim)
    if sample and params.sampling_seed is not None:  # the same seed n times would give the same text n times
        params = _reseeded(params, sample)
    return Request(prompt=prompt, params=params, limit=limit, text=text, **fields)


def _reseeded(params: SamplingParams, sample: int) -> SamplingParams:
    from msgspec.structs import replace

    return replace(params, sampling_seed=((params.sampling_seed or 0) + sample) % 2**63)


def _prompts(body: GenerateBody, engine: Engine) -> tuple[list[list[int]], bool]:
    if body.input_ids is not None:
        batched = bool(body.input_ids) and isinstance(body.input_ids[0], list)
        prompts = body.input_ids if batched else [body.input_ids]
    elif body.text is not None:
        batched = not isinstance(body.text, str)
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [engine.tokenizer.encode(text) for text in texts]
    else:
        raise ApiError("Either text or input_ids should be provided.")
    if not prompts or not all(prompts):
        raise ApiError("input_ids cannot be empty.")
    for prompt in prompts:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ApiError("input_ids must be a list of integers, or a list of such lists.")
        if not 0 <= min(prompt) <= max(prompt) < engine.model.vocab:
            raise ApiError(f"input_ids must be in [0, {engine.model.vocab - 1}].")
    return prompts, batched


def _spread(value: Any, size: int, name: str) -> list:
    if not isinstance(value, list):
        return [value] * size
    if len(value) != size:
        raise ApiError(f"{name} has {len(value)} items for {size} prompts.")
    return value


def _probes(value: list | None, size: int, vocab: int) -> list[list[int] | None]:
    rows = _spread(value, size, "token_ids_logprob") if value and isinstance(value[0], list | None) else [value] * size
    for token in [token for row in rows for token in row or []]:
        if type(token) is not int or not 0 <= token < vocab:
            raise ApiError(f"token_ids_logprob must hold token ids in [0, {vocab - 1}].")
    return rows


def _rids(value: str | list[str] | None, size: int, batched: bool) -> list[str]:
    if isinstance(value, list):
        return _spread(value, size, "rid")
    if value is None:
        return [uuid4().hex for _ in range(size)]
    return [f"{value}_{index}" for index in range(size)] if batched else [value]
