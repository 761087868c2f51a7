"""What a judge may answer, strictly: a user's program or a model in JSON, an evaluator as an Evaluation."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct, field

from polar.codec import convert, pack, unpack
from polar.errors import EvaluatorError, PolarError
from polar.result import Evaluation, Verdict

MAX_BYTES = 4 << 20
_DEPTH = 50  # of what a report may nest


class Judgement(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`trace_rewards`: one per trace, in their order, null for the outcome's. `metrics` go into the report."""

    reward: float
    trace_rewards: list[float | None] | None = None
    reason: Annotated[str, Meta(max_length=100_000)] = ""
    metrics: dict[str, float] = field(default_factory=dict)


def read(data: bytes, traces: int, low: float, high: float) -> Judgement:
    """Raises EvaluatorError `bad_judgement`, which another try may mend."""
    try:
        found = msgspec.json.decode(data, type=Judgement)
    except msgspec.DecodeError as e:
        raise _bad(f"{e}; found: {data[:200].decode('utf-8', 'replace')!r}") from e
    rewards = [found.reward, *(r for r in found.trace_rewards or [] if r is not None)]
    for r in [*rewards, *found.metrics.values()]:
        if not math.isfinite(r):
            raise _bad(f"{r} is not finite")
    if outside := [r for r in rewards if not low <= r <= high]:
        raise _bad(f"reward {outside[0]} is not between {low} and {high}")
    if found.trace_rewards is not None and len(found.trace_rewards) != traces:
        raise _bad(f"trace_rewards has {len(found.trace_rewards)} entries for {traces} traces")
    return found


def evaluation(found: Judgement, threshold: float, name: str, **report: Any) -> Evaluation:
    verdict: Verdict = "passed" if found.reward >= threshold else "partial" if found.reward > 0 else "failed"
    report |= {k: v for k in ("reason", "metrics") if (v := getattr(found, k))}
    return Evaluation(
        verdict=verdict,
        outcome_reward=found.reward,
        trace_rewards=found.trace_rewards,
        evaluator=name,
        report=report,
    )


def checked(found: Any) -> Evaluation:
    """What an evaluator returned, as a result holds it: a copy that was packed and read again. Numbers may be of any kind;
    its report is brought into form whatever it says, for an agent's files may speak in it. Raises EvaluatorError
    `evaluator_bug` naming the field."""
    if not isinstance(found, Evaluation):
        raise _bug(f"found {type(found).__name__}, allowed: an Evaluation")
    try:
        plain = {name: storable(getattr(found, name)) for name in Evaluation.__struct_fields__}
        plain["outcome_reward"] = _number(plain["outcome_reward"])
        if isinstance(rewards := plain["trace_rewards"], list):
            plain["trace_rewards"] = [_number(r) for r in rewards]
        out = convert(plain, Evaluation, "")
        out = unpack(pack(out), Evaluation)
    except PolarError as e:
        raise _bug(e.message) from e
    except Exception as e:
        raise _bug(f"can't be stored: {type(e).__name__}: {e}") from e
    for reward in [out.outcome_reward, *(out.trace_rewards or [])]:
        if reward is not None and not math.isfinite(reward):
            raise _bug(f"reward {reward} is not a finite number")
    return out


def storable(value: Any, depth: int = 0) -> Any:
    """`value` in what a result can hold, where that is known: text without halves of characters, integers of at most 64 bits,
    keys that are text, lists, plain numbers."""
    if isinstance(value, str):
        return printable(value)
    if depth > _DEPTH:
        return "(nested too deeply)"
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"(an integer of {value.bit_length()} bits)"
    if isinstance(value, Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {printable(k if isinstance(k, str) else repr(k)): storable(v, depth + 1) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [storable(v, depth + 1) for v in value]
    return value


def printable(text: str) -> str:
    """A file's name need not be UTF-8, and Python holds the other bytes as halves of characters: they are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _number(value: Any) -> Any:
    return value if isinstance(value, str | bytes) or not hasattr(value, "__float__") else float(value)


def _bug(message: str) -> EvaluatorError:
    return EvaluatorError(f"the evaluator's answer: {message}", code="evaluator_bug")


def _bad(message: str) -> EvaluatorError:
    return EvaluatorError(f"the judge's answer: {message}", code="bad_judgement")
