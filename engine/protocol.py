"""Bodies of the HTTP requests and their validation."""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec

from engine.errors import ApiError

Body = TypeVar("Body", bound=msgspec.Struct)
_GREEDY_BELOW = 1e-6
_STRUCTURED = ("json_schema", "regex", "ebnf", "structural_tag")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate with SGLang's names and defaults; null means the default."""

    max_new_tokens: int | None = 128  # None: until the context is full
    min_new_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all
    min_p: float = 0.0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    n: int = 1
    # Legal in SGLang. Without effect on sampling: accepted.
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    custom_params: dict | None = None
    # Legal in SGLang, not done here: accepted only where they change nothing.
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict | None = None
    stop_regex: str | list[str] | None = None
    beam_width: int | None = None
    watermark: dict | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken; log-probabilities are then those of temperature 1."""
        return self.temperature < _GREEDY_BELOW or self.top_k == 1

    @property
    def stops(self) -> list[str]:
        """Stop strings, without empty ones."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of /generate. Unknown fields are ignored, as SGLang does."""

    input_ids: list | None = None
    text: str | list[str] | None = None
    sampling_params: dict | list[dict] | None = None
    rid: str | list[str] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    token_ids_logprob: list | None = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False


class UpdateWeightsBody(msgspec.Struct, kw_only=True):
    """Body of /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class UpdateVersionBody(msgspec.Struct, kw_only=True):
    """Body of /update_weight_version: changes the label, not the weights."""

    new_version: str
    abort_all_requests: bool = True


class PauseBody(msgspec.Struct, kw_only=True):
    """Body of /pause_generation."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(msgspec.Struct, kw_only=True):
    """Body of /continue_generation; its fields concern GPUs only."""


class AbortBody(msgspec.Struct, kw_only=True):
    """Body of /abort_request."""

    rid: str = ""
    abort_all: bool = False


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /tokenize: a text, several, or messages for the chat template."""

    prompt: str | list[str] | None = None
    text: str | list[str] | None = None
    messages: list[dict] | None = None
    tools: list[dict] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of /detokenize."""

    tokens: list
    skip_special_tokens: bool = True


def decode(raw: bytes, kind: type[Body]) -> Body:
    """Parse a JSON body; an empty one is {}. Raises ApiError 400."""
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.DecodeError as error:  # ValidationError is one of them
        raise ApiError(f"Invalid request body: {error}") from None


def sampling_params(given: dict | None, vocab_size: int) -> SamplingParams:
    """Check and convert `sampling_params`. Raises ApiError 400."""
    given = {key: value for key, value in (given or {}).items() if value is not None or key == "max_new_tokens"}
    legal = SamplingParams.__struct_fields__
    unknown = sorted(set(given) - set(legal))
    if unknown:
        raise ApiError(
            f"Unknown sampling_params: {', '.join(unknown)}. The legal ones are: {', '.join(sorted(legal))}."
        )
    try:
        params = msgspec.convert(given, SamplingParams, strict=True)
    except msgspec.ValidationError as error:
        raise ApiError(f"Invalid sampling_params: {error}") from None
    _check(params, vocab_size)
    return params


def _check(params: SamplingParams, vocab_size: int) -> None:
    for name in _STRUCTURED:
        if getattr(params, name):
            raise ApiError(f"{name} isn't supported: this engine has no structured output.")
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "beam_width": 1}
    for name in (
        "frequency_penalty",
        "presence_penalty",
        "repetition_penalty",
        "logit_bias",
        "stop_regex",
        "beam_width",
    ):
        value = getattr(params, name)
        if value and value != neutral.get(name):
            raise ApiError(f"{name} isn't supported by this engine.")
    if params.watermark:
        raise ApiError("watermark isn't supported by this engine.")
    if not math.isfinite(params.temperature) or params.temperature < 0:
        raise ApiError(f"temperature must be a non-negative finite number, got {params.temperature}.")
    if not 0 < params.top_p <= 1:
        raise ApiError(f"top_p must be in (0, 1], got {params.top_p}.")
    if not 0 <= params.min_p <= 1:
        raise ApiError(f"min_p must be in [0, 1], got {params.min_p}.")
    if params.top_k < 1 and params.top_k != -1:
        raise ApiError(f"top_k must be -1 (disable) or at least 1, got {params.top_k}.")
    if params.max_new_tokens is not None and params.max_new_tokens < 0:
        raise ApiError(f"max_new_tokens must be at least 0, got {params.max_new_tokens}.")
    limit = math.inf if params.max_new_tokens is None else params.max_new_tokens
    if not 0 <= params.min_new_tokens <= limit:
        raise ApiError(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {params.min_new_tokens}.")
    if not 1 <= params.n <= 128:
        raise ApiError(f"n must be in [1, 128], got {params.n}.")
    if len(params.stops) > 64:
        raise ApiError(f"At most 64 stop strings are allowed, got {len(params.stops)}.")
    if params.sampling_seed is not None and not -(2**63) <= params.sampling_seed < 2**63:
        raise ApiError(f"sampling_seed must be in [-2**63, 2**63 - 1], got {params.sampling_seed}.")
    for token in params.stop_token_ids or []:
        if not 0 <= token < vocab_size:
            raise ApiError(f"stop_token_ids must be in [0, {vocab_size - 1}], got {token}.")
